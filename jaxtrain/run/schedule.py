"""When a run saves and evaluates: a pure function of the step."""

from typing import NamedTuple

from jaxtrain.checkpoint.checkpointer import is_save_due
from jaxtrain.config import Config


class Due(NamedTuple):
    save: bool
    evaluate: bool
    remember: bool  # the state is copied into memory
    resumable: bool  # the checkpoint can be resumed; if not, it holds the final weights alone


class Schedule:
    def __init__(self, config: Config, *, has_tests: bool, extra_save: int = 0):
        """Note whether there is a test split to evaluate on, and a step to save besides."""
        self._config = config
        self._has_tests = has_tests
        self._extra_save = extra_save
        self.steps = config.train.steps

    def at(self, step: int) -> Due:
        is_last = step == self.steps
        every = self._config.train.eval_every
        is_regular = bool(every) and step % every == 0
        in_memory = self._config.checkpoint.memory_every
        return Due(
            save=is_save_due(self._config, step) or step == self._extra_save,
            remember=bool(in_memory) and step % in_memory == 0 and not is_last,
            evaluate=self._has_tests and (is_last or is_regular),
            resumable=not is_last or self._config.checkpoint.final == "resumable",
        )
