"""What a plan refuses."""


class PlanError(ValueError):
    """A target that is unknown, or a run that does not fit. The message has the remedy."""
