"""When a run saves and evaluates: a pure function of the step."""

from typing import NamedTuple

from jaxtrain.config import Config


class Due(NamedTuple):
    save: bool
    evaluate: bool
    resumable: bool  # the checkpoint can be resumed; if not, it holds the final weights alone


class Schedule:
    def __init__(self, config: Config, *, tests: bool, also: int = 0):
        """Note whether there is a test split to evaluate on, and a step to save besides."""
        self._config, self._tests, self._also = config, tests, also
        self.steps = config.train.steps

    def at(self, step: int) -> Due:
        last, every = step == self.steps, self._config.train.eval_every
        return Due(
            save=is_save_due(self._config, step) or step == self._also,
            evaluate=self._tests and (last or bool(every and step % every == 0)),
            resumable=not last or self._config.checkpoint.final == "resumable",
        )


def is_save_due(config: Config, step: int) -> bool:
    """Whether a save follows ``step`` batches: regular, or before a possibly best evaluation."""
    every = config.train.eval_every if config.checkpoint.best else 0
    return (
        step % config.checkpoint.every == 0
        or step == config.train.steps
        or bool(every and step % every == 0)
    )
