"""Uses of a trained encoder: embeddings, detections, fitted heads, search, review, scores."""

from loaders.audio.recordings.annotations import Errors
from loaders.io.checks import UserError


class InferenceError(UserError, ValueError):
    """A run, recordings, embeddings, a head or a table that cannot be used."""


def refuse(errors: Errors) -> None:
    """Raise InferenceError for the first error of a kind that is refused."""
    refused_kinds = errors.refused()
    for kind, text in errors.lines:
        if kind in refused_kinds:
            raise InferenceError(f"{text} ({refused_kinds[0]}); correct the line")
