"""The commands: the trainer's, one file each, and those of the workloads (`jaxtrain.workload`)."""

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


_HERE = "jaxtrain.commands"
TRAINER = {
    "train": Command(f"{_HERE}.train", "train", "train a config, or resume its run", caches=True),
    "runs": Command(
        f"{_HERE}.runs",
        "monitor",
        "list all runs under a folder: state, step, scores, goodput, disk",
    ),
    "report": Command(
        f"{_HERE}.report",
        "monitor",
        "one HTML file of a run or of several: curves, time, pictures, generations, configs",
    ),
    "watch": Command(
        f"{_HERE}.watch", "monitor", "the same page in a browser, kept current while runs train"
    ),
    "profile": Command(
        f"{_HERE}.profile",
        "monitor",
        "trace the next steps of a running run, and show their time by part",
    ),
    "metrics": Command(f"{_HERE}.metrics", "monitor", "the records of runs as one Parquet table"),
    "diff": Command(
        f"{_HERE}.diff",
        "monitor",
        "the first step at which two runs differ, and by which fields, versions and arrays",
    ),
    "replay": Command(
        f"{_HERE}.replay",
        "monitor",
        "make any step of a run again, and compare it with the records",
        takes_workload=True,
        caches=True,
    ),
    "prove": Command(
        f"{_HERE}.prove",
        "monitor",
        "kill a run again and again, and show that it ends with the same bits",
    ),
    "plan": Command(
        f"{_HERE}.plan",
        "plan",
        "memory, time and problems of a run on any devices, before it starts",
        caches=True,
    ),
    "explain": Command(f"{_HERE}.explain", "plan", "every field of a config: value, unit, meaning"),
    "export": Command(
        f"{_HERE}.export",
        "weights",
        "convert a checkpoint to safetensors for Hugging Face, and back",
        takes_workload=True,
    ),
    "lora-to-peft": Command(
        f"{_HERE}.lora_to_peft",
        "weights",
        "write the adapters of a run in peft's format",
        takes_workload=True,
    ),
    "checkpoint": Command(
        f"{_HERE}.checkpoint", "weights", "inspect, verify, compare and strip checkpoints"
    ),
    "doctor": Command(
        f"{_HERE}.doctor", "clusters", "check host, devices, disk, software and data before a run"
    ),
    "launch": Command(
        f"{_HERE}.launch", "clusters", "submit a run or a sweep to SLURM, and watch it"
    ),
}


def table(*others: str) -> dict[str, Command]:
    """Every command by its name, in the order of the listing.

    They are the trainer's, the shipped workloads' and those of ``others``: dotted names of
    workloads that the user named.

    Raises WorkloadError: a workload has a command whose name is taken; ImportError: a workload
    cannot be imported.
    """
    commands = dict(TRAINER)
    owners = dict.fromkeys(TRAINER, "the trainer")  # of the commands, by their names
    for workload_name in (*workload.shipped(), *others):
        added = workload.of(workload_name).commands
        taken = []
        for name, command in added.items():
            # A workload may build on another, and keep its commands.
            if commands.get(name, command) != command:
                taken.append(
                    f"the command {name!r} of {workload_name} is one of {owners[name]} already"
                )
        if taken:
            pronoun = "it" if len(taken) == 1 else "them"
            raise workload.WorkloadError(f"{'; '.join(taken)}; rename {pronoun} in its WORKLOAD")
        commands |= added
        owners |= dict.fromkeys(added, workload_name)
    groups = [*GROUPS, *(command.group for command in commands.values())]
    return dict(sorted(commands.items(), key=lambda item: groups.index(item[1].group)))
