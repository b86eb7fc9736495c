"""The objectives: modules of this folder with an ``OBJECTIVE``, found by their names alone."""

import importlib
import pkgutil

from jaxtrain.workloads.bird.objective import Objective

# Terms are added up in this order, then by name: a sum of floats in another order would end in
# other bits.
_FIRST = ("supervised", "lejepa", "diet", "mae", "teacher")


def _find() -> dict[str, Objective]:
    """Name -> objective. Raises TypeError for a module without one."""
    others = sorted({module.name for module in pkgutil.iter_modules(__path__)} - set(_FIRST))
    objectives = {}
    for name in (*_FIRST, *others):
        objective = getattr(importlib.import_module(f"{__name__}.{name}"), "OBJECTIVE", None)
        if not isinstance(objective, Objective):
            raise TypeError(
                f"{__name__}.{name} has to define OBJECTIVE, an {Objective.__module__}.Objective"
            )
        objectives[name] = objective
    return objectives


OBJECTIVES = _find()
