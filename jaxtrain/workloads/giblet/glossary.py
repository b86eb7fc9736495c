"""The meanings of this workload's metrics."""

from jaxtrain.telemetry.glossary import Entry

GLOSSARY = (
    Entry("total_loss", "total_loss", "weighted sum of the losses"),
    Entry(
        "fmri_r",
        "fmri_r",
        "correlation of predicted and measured voxels at a time, mean over rows",
        less_is_better=False,
    ),
    Entry("fmri_r_null", "fmri_r_null", "fmri_r against another time's measurement: chance level"),
    Entry(
        "fmri_r2",
        "fmri_r2",
        "share of the variance over voxels that is predicted",
        less_is_better=False,
    ),
    Entry(
        "voxel_r, voxel_r2",
        "voxel_r2?",
        "correlation over time in a voxel, and the share of its variance, as means over voxels",
        less_is_better=False,
    ),
    Entry(
        "voxel_r_best",
        "voxel_r_best",
        "voxel_r of a voxel among the best 10 %",
        less_is_better=False,
    ),
    Entry(
        "voxel_r_null", "voxel_r_null", "voxel_r against other times' measurements: chance level"
    ),
    Entry(
        "X_raw",
        r"(?P<X>.+)_raw",
        "error of modality X, undivided",
        less_is_better=True,
    ),
    Entry(
        "X_loss",
        r"(?P<X>.+)_loss",
        "error of modality X over its standard deviation, before its weight",
    ),
)
