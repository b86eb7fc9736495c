"""Uses of a trained encoder: embeddings, detections, fitted heads, search, review, scores."""

from loaders.io.checks import UserError


class InferenceError(UserError, ValueError):
    """A run, recordings, embeddings, a head or a table that cannot be used."""


def errors() -> tuple[type[Exception], ...]:
    """List the errors that a command reports in one line."""
    from jaxtrain import config
    from jaxtrain.arrays import stored
    from jaxtrain.parallel import cluster
    from loaders.base import DataError

    return InferenceError, DataError, stored.StoredError, config.ConfigError, cluster.ClusterError
