"""The meanings of the names in metrics.jsonl: every run's, and a `WORKLOAD.glossary`'s."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jaxtrain import workload as workload_lib


@dataclasses.dataclass(frozen=True)
class Entry:
    """Names of metrics that mean the same. Raises WorkloadError for a bad pattern."""

    names: str  # as people read them: X stands for a part of the model, a number or a name
    pattern: str  # regular expression of the whole name, with groups named by their letter
    meaning: str
    # whether a smaller value is the better one; None = as the end of the name says, if it does
    less_is_better: bool | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise workload_lib.WorkloadError(
                f"the glossary's Entry {self.names!r} has the pattern {self.pattern!r},"
                f" which is no regular expression: {error}"
            ) from error


# the last word of a metric's name, if nothing else tells which value is the better one
LESS_IS_BETTER = {"loss", "error", "entropy", "perplexity", "distance"}
MORE_IS_BETTER = {"accuracy", "precision", "recall", "auroc", "f1"}
STEP = (
    Entry("loss", "loss", "the minimised sum of its terms, per valid row or token"),
    Entry(
        "digest_high, digest_low",
        r"digest_(high|low)",
        "halves of the digest of the whole state after the step",
    ),
    Entry("grad_norm", "grad_norm", "norm of the gradient before clipping"),
    Entry(
        "grad_norm_X",
        r"grad_norm_(?P<X>.+)",
        "norm of the gradient before clipping, of the parameters below X alone",
    ),
    Entry(
        "update_norm, update_norm_X",
        r"update_norm(_.+)?",
        "norm of the step's update of the parameters",
    ),
    Entry(
        "param_norm_before, param_norm_after",
        r"param_norm_(before|after)(_.+)?",
        "norm of the parameters around the step",
    ),
    Entry(
        "skipped",
        "skipped",
        "1 for a step that was refused, because its gradient was not finite or a spike",
    ),
    Entry(
        "miscomputed",
        "miscomputed",
        "1 if the two computations of a step differed (guard.verify_every)",
    ),
    Entry(
        "steps_per_second, examples_per_second",
        r"(steps|examples)_per_second",
        "pace since the record before",
    ),
    Entry(
        "mfu",
        "mfu",
        "share of the devices' peak that the model's arithmetic reached. Above 1, the measured peak"
        " of a CPU is too low, or Task.flops too high",
    ),
    Entry(
        "mfu_full_attention",
        "mfu_full_attention",
        "mfu with attention counted as if no mask or window applied",
    ),
    Entry(
        "mfu_documents",
        "mfu_documents",
        "mfu with attention counted within documents alone, by those of the latest step",
    ),
    Entry(
        "data_wait_share",
        "data_wait_share",
        "share of the time in which the loop waited for the loader",
    ),
    Entry(
        "rows_asked_per_second, rows_given_per_second",
        r"rows_(asked|given)_per_second",
        "rows that steps would take without a wait, and that the loader makes while it works",
    ),
    Entry(
        "cores_missing",
        "cores_missing",
        "cores of each process that would close that gap, for the loader alone",
    ),
    Entry(
        "goodput",
        "goodput",
        "share of the wall time, over all starts, that went into steps made for the first time",
    ),
    Entry("eta_seconds", "eta_seconds", "seconds to the last step at this pace"),
)
DATA = (
    Entry(
        "X_expected",
        r"(?P<X>.+)_expected",
        "the value of X if each example were drawn independently",
    ),
    Entry(
        "chi2_mod",
        "chi2_mod",
        "spread of a batch over 256 buckets by row number modulo 256, per degree of freedom; 1 is"
        " even",
    ),
    Entry(
        "chi2_div",
        "chi2_div",
        "chi2_mod over 256 runs of neighbouring rows: high if a batch holds neighbours",
    ),
    Entry(
        "chi2_hash, chi2_shard",
        "chi2_(hash|shard)",
        "chi2_mod over buckets by hash, and over shards",
    ),
    Entry(
        "acf_mod, acf_div, acf_hash, acf_shard",
        "acf_(mod|div|hash|shard)",
        "correlation of successive batches in these buckets; 0 is well shuffled, 0.8 is a shuffle"
        " buffer that is too small",
    ),
    Entry("unique", "unique", "different examples in a batch"),
    Entry("overlap", "overlap", "examples that a batch shares with the one before"),
    Entry("bucket_overlap", "bucket_overlap", "overlap of 4,096 buckets by hash"),
    Entry("window_unique", "window_unique", "different examples in the last 100 batches"),
)
SAVE = (
    Entry("seconds", "seconds", "seconds that the loop waited for a save"),
    Entry("steps", "steps", "steps that would have fitted into the wait for a save"),
    Entry("failures", "failures", "saves of this run that failed"),
)


def is_known(workload: str) -> bool:
    """Whether this package ships a workload, or this process imported it. None is imported."""
    return workload in workload_lib.shipped() or workload_lib.is_imported(workload)


def of_workload(name: str) -> tuple[Entry, ...]:
    """Return the entries of a workload, () of one that is not known. Raises WorkloadError."""
    if not is_known(name):
        return ()
    glossary = workload_lib.of(name).glossary
    for entry in glossary:
        if not isinstance(entry, Entry):
            raise workload_lib.WorkloadError(
                f"the glossary of {name} has {entry!r}; expected a jaxtrain.Entry"
            )
    return glossary


def entries(workload: str, split: str) -> tuple[Entry, ...]:
    """Return a workload's entries for a ``split``: "train", "data", "save" or "test"."""
    if split == "data":
        return DATA
    if split == "save":
        return SAVE
    return (*of_workload(workload), *STEP)


def without_metric(entries: Iterable[Entry], names: Iterable[str]) -> list[str]:
    """List the entries that match none of ``names``, a run's metrics: for a workload's tests."""
    names = list(names)
    unmatched = []
    for entry in entries:
        if not any(re.fullmatch(entry.pattern, name) for name in names):
            unmatched.append(entry.names)
    return unmatched


def meaning(name: str, *, workload: str, split: str) -> str:
    """Return the meaning of a metric, with X, N and K filled in, or "" if none is known."""
    for entry in entries(workload, split):
        if match := re.fullmatch(entry.pattern, name):
            return _fill_in(entry.meaning, match.groupdict())
    return ""


def less_is_better(name: str, *, workload: str) -> bool | None:
    """Whether a smaller value of an evaluation's metric is the better one. None: nothing tells."""
    for entry in entries(workload, "test"):
        if re.fullmatch(entry.pattern, name):
            if entry.less_is_better is not None:
                return entry.less_is_better
            break
    last_word = re.split("[_/]", name.lower())[-1]
    if last_word in LESS_IS_BETTER:
        return True
    return False if last_word in MORE_IS_BETTER else None


def wrong_sign(metric: str, *, workload: str) -> str:
    """Return why a metric that is ranked, with "-" before it if less is better, is wrong, or ""."""
    name = metric.removeprefix("-")
    has_minus = name != metric
    is_less = less_is_better(name, workload=workload)
    if is_less is None or is_less == has_minus:
        return ""
    if is_less:
        return f"is {metric!r}, of which the largest is the best, and less is better; set '-{name}'"
    return f"is {metric!r}, of which the smallest is the best, and more is better; set {name!r}"


def _fill_in(meaning: str, values: Mapping[str, str | None]) -> str:
    """Replace the letters X, N and K by their values in a metric's name."""
    return re.sub(r"\b[XNK]\b", lambda letter: values.get(letter[0]) or letter[0], meaning)


def explained(workload: str) -> str:
    """Lines for `jaxtrain explain`: the names in the records of a run, by split."""
    titles = {
        "train": "train and test",
        "data": "data: how well the examples are shuffled",
        "save": "save",
    }
    lines = []
    for split, title in titles.items():
        lines.append(f"metrics of {title}")
        listed = entries(workload, split)
        width = max(len(entry.names) for entry in listed)
        lines += [f"  {entry.names:{width}}  {entry.meaning}" for entry in listed]
    return "\n".join(lines)
