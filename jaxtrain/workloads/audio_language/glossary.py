"""The meanings of this workload's metrics."""

from jaxtrain.telemetry.glossary import Entry

GLOSSARY = (
    Entry(
        "text, audio",
        "text|audio",
        "nats per label of text, and of sound: the mean over codebooks. Their sum is the loss",
        less_is_better=True,
    ),
    Entry(
        "audio_K",
        r"audio_(?P<K>\d+)",
        "nats per label of codebook K",
        less_is_better=True,
    ),
    Entry(
        "text_accuracy, audio_accuracy_K",
        r"text_accuracy|audio_accuracy_\d+",
        "share of labels that were the likeliest",
        less_is_better=False,
    ),
)
