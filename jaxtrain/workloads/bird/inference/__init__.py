"""Uses of a trained encoder: embeddings, detections, fitted heads, search, review, scores."""

from loaders.audio.recordings.annotations import Errors
from loaders.io import checks
from loaders.io.checks import UserError


class InferenceError(UserError, ValueError):
    """A run, recordings, embeddings, a head or a table that cannot be used."""


def refuse(errors: Errors) -> None:
    """Raise InferenceError for the first error of a kind that is refused. It lists the others."""
    refused_kinds = errors.refused()
    refused = [(kind, text) for kind, text in errors.lines if kind in refused_kinds]
    if refused:
        kind, text = refused[0]
        raise InferenceError(
            f"{text} ({kind}); correct the line{checks.more(len(refused))}", listed=errors.listed()
        )
