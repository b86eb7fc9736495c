"""The meanings of this workload's metrics."""

from jaxtrain.telemetry.glossary import Entry

GLOSSARY = (
    Entry("cross_entropy", "cross_entropy", "nats per token"),
    Entry(
        "perplexity",
        "perplexity",
        "exponential of cross_entropy: the number of equally likely tokens",
    ),
    Entry(
        "bits_per_byte",
        "bits_per_byte",
        "bits for each byte of the text behind the tokens: comparable between tokenizers",
        less_is_better=True,
    ),
    Entry("accuracy", "accuracy", "share of tokens that were the likeliest"),
    Entry(
        "z_loss",
        "z_loss",
        "part of the loss: square of the softmax's log normaliser, times model.z_loss",
    ),
    Entry("tokens", "tokens", "valid targets in a row"),
    Entry(
        "X_source_N",
        r"(?P<X>cross_entropy|perplexity)_source_(?P<N>\d+)",
        "X on source number N of data.sources",
        less_is_better=True,
    ),
    Entry(
        "MODULE/reward, MODULE/X",
        r".+/.+",
        "mean score of the generations for the prompts of model.targets, and its parts",
    ),
)
