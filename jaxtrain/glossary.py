"""What the names in metrics.jsonl mean: the one glossary, for `jaxtrain explain`, the model card and docs/reference.md."""

import re
from typing import NamedTuple


class Entry(NamedTuple):
    """Names of metrics that mean the same."""

    names: str  # as people read them: X stands for a part of the model, a number or a name
    pattern: str  # regular expression of the whole name; a group is named by the letter that stands for it
    meaning: str


STEP = (
    Entry("loss", "loss", "what the step minimises: the sum of its terms, per valid row or token"),
    Entry("grad_norm", "grad_norm", "norm of the gradient before clipping"),
    Entry("grad_norm_X", r"grad_norm_(?P<X>.+)", "norm of the gradient before clipping, of the parameters below X alone"),
    Entry("update_norm, update_norm_X", r"update_norm(_.+)?", "norm of what the step adds to the parameters"),
    Entry("param_norm_before, param_norm_after", r"param_norm_(before|after)(_.+)?", "norm of the parameters around the step"),
    Entry("skipped", "skipped", "1 for a step that was refused, because its gradient was not finite or a spike"),
    Entry("steps_per_second, samples_per_second", r"(steps|samples)_per_second", "pace since the record before"),
    Entry("mfu", "mfu", "share of the devices' peak that the model's arithmetic reached"),
    Entry("mfu_full_attention", "mfu_full_attention", "mfu with the places that a causal mask or a window leaves out"),
    Entry("data_wait_share", "data_wait_share", "share of the time in which the loop waited for the loader"),
    Entry("goodput", "goodput", "share of the wall time, over all starts, that went into steps made for the first time"),
    Entry("eta_seconds", "eta_seconds", "seconds to the last step at this pace"),
)
DATA = (
    Entry("X_expected", r"(?P<X>.+)_expected", "what X would be if each recording were drawn independently"),
    Entry(
        "chi2_mod", "chi2_mod", "spread of a batch over 256 buckets by row number modulo 256, per degree of freedom; 1 is even"
    ),
    Entry("chi2_div", "chi2_div", "chi2_mod over 256 runs of neighbouring rows: high where a batch holds neighbours"),
    Entry("chi2_hash, chi2_shard", "chi2_(hash|shard)", "chi2_mod over buckets by hash, and over shards"),
    Entry(
        "acf_mod, acf_div, acf_hash, acf_shard",
        "acf_(mod|div|hash|shard)",
        "correlation of successive batches in these buckets; 0 is well shuffled, 0.8 is a shuffle buffer that is too small",
    ),
    Entry("unique", "unique", "different recordings in a batch"),
    Entry("overlap", "overlap", "recordings that a batch shares with the one before"),
    Entry("bucket_overlap", "bucket_overlap", "overlap of 4,096 buckets by hash"),
    Entry("window_unique", "window_unique", "different recordings in the last 100 batches"),
)
SAVE = (
    Entry("seconds", "seconds", "that the loop waited for a save"),
    Entry("steps", "steps", "that would have fitted into this wait"),
    Entry("failures", "failures", "saves of this run that failed"),
)
WORKLOADS = {
    "jaxtrain.workloads.bird": (
        Entry("accuracy", "accuracy", "share of recordings whose likeliest class by the objective's head is theirs"),
        Entry(
            "probe_accuracy",
            "probe_accuracy",
            "accuracy of the online probe, a linear layer on features that trains nothing else",
        ),
        Entry("probe_loss", "probe_loss", "of the online probe; part of the loss, and of no gradient of the encoder's"),
        Entry("objective_loss", "objective_loss", "weighted sum of the objectives: the loss without the probe's"),
        Entry("X_loss", r"(?P<X>supervised|mae|lejepa|diet|teacher)_loss", "of objective X, before its weight"),
        Entry("lejepa_invariance", "lejepa_invariance", "how far the views of a recording are apart"),
        Entry("lejepa_sigreg", "lejepa_sigreg", "how far the embeddings are from a Gaussian"),
        Entry("diet_accuracy", "diet_accuracy", "share of crops whose own recording is the likeliest"),
    ),
    "jaxtrain.workloads.language": (
        Entry("cross_entropy", "cross_entropy", "nats per token"),
        Entry("perplexity", "perplexity", "exponential of cross_entropy: the number of equally likely tokens"),
        Entry(
            "bits_per_byte",
            "bits_per_byte",
            "bits for each byte of the text behind the tokens: comparable between tokenizers",
        ),
        Entry("accuracy", "accuracy", "share of tokens that were the likeliest"),
        Entry("z_loss", "z_loss", "part of the loss: square of the softmax's log normaliser, times model.z_loss"),
        Entry("tokens", "tokens", "valid targets in a row"),
        Entry("X_source_N", r"(?P<X>cross_entropy|perplexity)_source_(?P<N>\d+)", "X on source number N of data.sources"),
        Entry(
            "MODULE/reward, MODULE/X",
            r".+/.+",
            "mean score of what the model wrote to the prompts of model.targets, and its parts",
        ),
    ),
    "jaxtrain.workloads.trm": (
        Entry("lm_loss", "lm_loss", "cross-entropy of the cells of a board"),
        Entry(
            "q_halt_loss, q_continue_loss",
            "q_(halt|continue)_loss",
            "of the heads that decide when to stop; half of it is in the loss",
        ),
        Entry("accuracy", "accuracy", "share of cells that are right"),
        Entry("exact_accuracy", "exact_accuracy", "share of boards that are solved"),
        Entry(
            "exact_accuracy_difficulty_N",
            r"exact_accuracy_difficulty_(?P<N>\d+)",
            "share that is solved of boards in difficulty class N, from easy to hard",
        ),
        Entry("q_halt_accuracy", "q_halt_accuracy", "share of boards of which the halting head knows whether they are solved"),
        Entry("steps", "steps", "supervision steps of boards that were finished"),
        Entry("halted", "halted", "share of boards that were finished in this step"),
    ),
    "jaxtrain.workloads.giblet": (
        Entry("total_loss", "total_loss", "weighted sum of the losses"),
        Entry("fmri_r", "fmri_r", "correlation of predicted and measured voxels at a time, mean over rows"),
        Entry("fmri_r_null", "fmri_r_null", "fmri_r against another time's measurement: what chance gives"),
        Entry("fmri_r2", "fmri_r2", "share of the variance over voxels that is predicted"),
        Entry(
            "voxel_r, voxel_r2",
            "voxel_r2?",
            "correlation over time in a voxel, and the share of its variance; mean over voxels",
        ),
        Entry("voxel_r_best", "voxel_r_best", "voxel_r of a voxel among the best 10 %"),
        Entry("voxel_r_null", "voxel_r_null", "voxel_r against other times' measurements: what chance gives"),
        Entry("X_raw", r"(?P<X>.+)_raw", "error of modality X, undivided"),
        Entry("X_loss", r"(?P<X>.+)_loss", "error of modality X over its standard deviation, before its weight"),
    ),
    "jaxtrain.workloads.audio_language": (
        Entry(
            "text, audio",
            "text|audio",
            "nats per label of text, and of sound: the mean over codebooks; their sum is the loss",
        ),
        Entry("audio_K", r"audio_(?P<K>\d+)", "nats per label of codebook K"),
        Entry(
            "text_accuracy, audio_accuracy_K",
            r"text_accuracy|audio_accuracy_\d+",
            "share of labels that were the likeliest",
        ),
    ),
}


def entries(workload: str, split: str) -> tuple[Entry, ...]:
    """The entries that the records of a ``split`` ("train", "data", "save", "test") of a workload can have."""
    if split == "data":
        return DATA
    return SAVE if split == "save" else (*WORKLOADS.get(workload, ()), *STEP)


def meaning(name: str, *, workload: str, split: str) -> str:
    """What a metric means, X, N and K filled in; empty for one that a workload of the user's own has."""
    for entry in entries(workload, split):
        if found := re.fullmatch(entry.pattern, name):
            return re.sub(r"\b[XNK]\b", lambda letter: found.groupdict().get(letter[0]) or letter[0], entry.meaning)
    return ""


def explained(workload: str) -> str:
    """Lines for `jaxtrain explain`: the names in the records of a run, by split."""
    lines = []
    for split, parts in (
        ("train and test", (*WORKLOADS.get(workload, ()), *STEP)),
        ("data: how well the recordings are shuffled", DATA),
        ("save", SAVE),
    ):
        width = max(len(e.names) for e in parts)
        lines += [f"metrics of {split}", *(f"  {e.names:{width}}  {e.meaning}" for e in parts)]
    return "\n".join(lines)
