"""When a run saves and evaluates: a pure function of the step."""

from typing import NamedTuple

from jaxtrain.checkpoint.checkpointer import is_save_due
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
