"""The meaning of this workload's metrics."""

from jaxtrain.telemetry.glossary import Entry

GLOSSARY = (
    Entry(
        "accuracy",
        "accuracy",
        "share of recordings whose likeliest class by the objective's head is theirs",
    ),
    Entry(
        "probe_accuracy",
        "probe_accuracy",
        "accuracy of the online probe, a linear layer that trains nothing else",
    ),
    Entry(
        "probe_loss",
        "probe_loss",
        "loss of the online probe: part of the loss, without a gradient for the encoder",
    ),
    Entry(
        "objective_loss",
        "objective_loss",
        "weighted sum of the objectives: the loss without the probe's",
    ),
    Entry(
        "X_loss",
        r"(?P<X>supervised|mae|lejepa|diet|teacher)_loss",
        "loss of objective X, before its weight",
    ),
    Entry(
        "lejepa_invariance",
        "lejepa_invariance",
        "distance between the views of a recording",
        less_is_better=True,
    ),
    Entry(
        "lejepa_sigreg",
        "lejepa_sigreg",
        "distance of the embeddings from a Gaussian",
        less_is_better=True,
    ),
    Entry("diet_accuracy", "diet_accuracy", "share of crops whose own recording is the likeliest"),
)
