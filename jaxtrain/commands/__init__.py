"""The commands: the trainer's, one file each, and those of the workloads (`jaxtrain.workload`)."""

from typing import Any

from jaxtrain import workload
from jaxtrain.workload import Command

GROUPS = (
    "train",
    "monitor",
    "plan",
    "data",
    "weights",
    "inference",
    "evaluate",
    "clusters",
    "shell",
)


def _own(name: str, group: str, summary: str, **kwargs: Any) -> tuple[str, Command]:
    return name, Command(f"jaxtrain.commands.{name.replace('-', '_')}", group, summary, **kwargs)


BOTH = {"takes_workload": True, "caches": True}
TRAINER = dict(
    (
        _own("train", "train", "train a config, or resume its run", caches=True),
        _own("runs", "monitor", "list all runs under a folder: state, step, scores, goodput, disk"),
        _own(
            "report",
            "monitor",
            "one HTML file of a run or of several: curves, time, pictures, generations, configs",
        ),
        _own("watch", "monitor", "the same page in a browser, kept current while runs train"),
        _own(
            "profile",
            "monitor",
            "trace the next steps of a running run, and show their time by part",
        ),
        _own("metrics", "monitor", "the records of runs as one Parquet table"),
        _own(
            "diff",
            "monitor",
            "the first step at which two runs differ, and by which fields, versions and arrays",
        ),
        _own(
            "replay",
            "monitor",
            "make any step of a run again, and compare it with the records",
            **BOTH,
        ),
        _own(
            "prove",
            "monitor",
            "kill a run again and again, and show that it ends with the same bits",
        ),
        _own(
            "plan",
            "plan",
            "memory, time and problems of a run on any devices, before it starts",
            caches=True,
        ),
        _own("explain", "plan", "every field of a config: value, unit, meaning"),
        _own(
            "export",
            "weights",
            "convert a checkpoint to safetensors for Hugging Face, and back",
            takes_workload=True,
        ),
        _own(
            "lora-to-peft",
            "weights",
            "write the adapters of a run in peft's format",
            takes_workload=True,
        ),
        _own("checkpoint", "weights", "inspect, verify, compare and strip checkpoints"),
        _own(
            "doctor",
            "clusters",
            "check host, devices, disk, software and data before a run",
        ),
        _own("launch", "clusters", "submit a run or a sweep to SLURM, and watch it"),
    )
)


def table(*others: str) -> dict[str, Command]:
    """Every command by its name, in the order of the listing.

    They are the trainer's, the shipped workloads' and those of ``others``: dotted names of
    workloads that the user named.

    Raises WorkloadError: a workload has a command whose name is taken; ImportError: a workload
    cannot be imported.
    """
    found, origin = dict(TRAINER), dict.fromkeys(TRAINER, "the trainer")
    for name in (*workload.shipped(), *others):
        own = workload.of(name).commands
        # A workload may build on another, and keep its commands.
        if taken := [word for word, command in own.items() if found.get(word, command) != command]:
            text = "; ".join(
                f"the command {word!r} of {name} is one of {origin[word]} already" for word in taken
            )
            raise workload.WorkloadError(
                f"{text}; rename {'it' if len(taken) == 1 else 'them'} in its WORKLOAD"
            )
        found |= own
        origin |= dict.fromkeys(own, name)
    groups = [*GROUPS, *(command.group for command in found.values())]
    return dict(sorted(found.items(), key=lambda item: groups.index(item[1].group)))
