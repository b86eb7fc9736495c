"""Uses of a trained encoder: embeddings, detections, fitted heads, search, review, scores."""

from loaders.io.checks import UserError


class InferenceError(UserError, ValueError):
    """A run, recordings, embeddings, a head or a table that cannot be used."""
