"""The objectives: modules of this folder with an ``OBJECTIVE``, found by their names alone."""

import importlib
import pkgutil

from jaxtrain.workloads.bird.objective import Objective

# Terms are added up in this order, then by name: a sum of floats in another order would end in
# other bits.
_FIRST = ("supervised", "lejepa", "diet", "mae", "teacher")


def _find() -> dict[str, Objective]:
    """Name -> objective. Raises TypeError for a module without one."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    later = sorted(names - set(_FIRST))
    objectives = {}
    for name in (*_FIRST, *later):
        module = importlib.import_module(f"{__name__}.{name}")
        objective = getattr(module, "OBJECTIVE", None)
        if not isinstance(objective, Objective):
            raise TypeError(
                f"{__name__}.{name} has to define OBJECTIVE, an {Objective.__module__}.Objective"
            )
        objectives[name] = objective
    return objectives


OBJECTIVES = _find()
