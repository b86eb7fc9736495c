"""Write the slices and accelerator types of TPUs that a plan takes to `tools/tpu_slices.txt`.

    python -m tools.write_tpu_slices

`tools/launch_tpu.sh` reads them, on machines without Python. A line has the kind of its names, the
version in `jaxtrain plan`, the version in gcloud, and the sides of slices or the numbers of types.
A line of ``counts`` has the version of a type and the numbers of all its slices: gcloud has types
of some that are no powers of two.
"""

import math
import pathlib
from collections.abc import Iterator

from jaxtrain.parallel import chips
from jaxtrain.plan import slices
from jaxtrain.plan.target import TPU_TYPES, PlanError, parse_target

FILE = pathlib.Path(__file__).with_name("tpu_slices.txt")
NAMES = {"v5e": "v5litepod"}  # in gcloud, if not the plan's
NUMBERS = [1 << i for i in range(15)]  # of types, of which none is in between


def lines() -> Iterator[str]:
    for chip in chips.CHIPS:
        if chip.is_tpu:
            sides = ["x".join(map(str, each)) for each in slices.existing(chip.name)]
            yield " ".join(["slices", chip.name, NAMES.get(chip.name, chip.name), *sides])
    for name in TPU_TYPES:
        numbers = [str(n) for n in NUMBERS if is_type(f"{name}-{n}")]
        yield " ".join(["types", name, NAMES.get(name, name), *numbers])
    for name, of_type in TPU_TYPES.items():
        n_chips = {math.prod(sides) for sides in slices.existing(of_type.chip)}
        yield " ".join(["counts", name, *(str(of_type.per_chip * n) for n in sorted(n_chips))])


def is_type(name: str) -> bool:
    try:
        parse_target(f"tpu:{name}")
    except PlanError:
        return False
    return True


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
