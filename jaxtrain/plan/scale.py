"""The growth of a run with the number of its devices, with a program compiled for each size.

A range of sizes has its first size, each doubling of it that exists, and its last. With another
factor than two it has fewer:

    tpu:v5p:4..4096       chips of one slice, with the most even sides
    tpu:v5e:16x16*1..8    slices of one size, and nodes likewise
    gpu:h100x8..1024      GPUs

weak      the first size has the batch of the config, and it grows with the devices
strong    each size has the batch of the config

The mesh of a size is the config's, whose axis of -1 takes the devices. If the mesh is on auto, each
size has the first mesh that fits, in the order of `mesh_search`, with the fields on auto that come
with it. A size that does not fit, or that no compiler took, has a reason in place of its figures.
"""

import importlib.metadata
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxtrain import config as config_lib
from jaxtrain.parallel import chips
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import environment, slices, worker
from jaxtrain.plan.auto import decide
from jaxtrain.plan.candidates import MESH, NOTHING, Choice
from jaxtrain.plan.compile import NO_OFFLOAD
from jaxtrain.plan.mesh_search import Candidate, Search, Settled
from jaxtrain.plan.target import TPU_TYPES, PlanError, Target, no_slice, parse_target, unknown
from loaders.io.checks import first_line

WEAK, STRONG = "weak", "strong"
DOUBLE = 2
EXAMPLES = "tpu:v5p:4..4096, gpu:h100x8..1024 or 'tpu:v5e:16x16*1..8'"


class Row(NamedTuple):
    """A size of the range, in one kind of growth."""

    growth: str  # WEAK or STRONG
    target: Target
    batch: int  # rows of a step
    settled: Settled

    @property
    def chips(self) -> int:
        return self.target.count // self.target.known_chip.devices

    @property
    def seconds(self) -> float:
        """The forecast of a step, times the devices, for a row of the batch."""
        return self.settled.seconds * self.target.count / self.batch

    @property
    def fits(self) -> bool:
        return self.settled.step is not None and not self.settled.reason


def parse_range(
    text: str, factor: int = DOUBLE, note: Callable[[str], None] = lambda line: None
) -> list[Target]:
    """List the sizes of a range, the smallest first, each ``factor`` times the one before.

    ``note``: takes a line with the sizes between the ends that do not exist. Raises PlanError.
    """
    match = re.fullmatch(r"(gpu:\w+x|tpu:\w+[:-]|\w+:.+\*)(\d+)\.\.(\d+)", text.lower())
    if not match:
        raise PlanError(f"--scale takes a range of sizes as {EXAMPLES}, and TARGET is {text!r}")
    kind, first, last = match[1], int(match[2]), int(match[3])
    if not (first and last):
        least = _least(kind)
        ends = f"{least}..{max(first, last, least)}"
        raise PlanError(f"{text}: the smallest size is {least}; write {kind}{ends}")
    if first > last:
        raise PlanError(f"{text}: {first} is more than {last}; write {kind}{last}..{first}")
    counts = [first]
    while factor * counts[-1] < last:
        counts.append(factor * counts[-1])
    counts += [last] if last > first else []
    targets, missing = [], []
    for count in counts:
        try:
            targets.append(_of_count(text, kind, count))
        except PlanError:
            if count in (first, last):
                raise
            missing.append(f"{kind}{count}")
    if missing:
        note(f"{text} has no {', '.join(missing)}: there are no such slices")
    return targets


def _least(kind: str) -> int:
    """Return the smallest number that a range of a kind, as "tpu:v4:", can begin with."""
    match = re.fullmatch(r"tpu:(\w+)([:-])", kind)
    if not match:
        return 1
    of_type = TPU_TYPES.get(match[1]) if match[2] == "-" else None
    chip = chips.by_name(of_type.chip if of_type else match[1])
    if chip is None or not chip.is_tpu:
        return 1
    per_chip = of_type.per_chip if of_type else 1
    return per_chip * math.prod(slices.existing(chip.name)[0])


def _of_count(text: str, kind: str, count: int) -> Target:
    """Return the target of a kind, as "gpu:h100x", with a count. Raises PlanError."""
    if not (kind.startswith("tpu:") and kind.endswith(":")):
        return parse_target(f"{kind}{count}")
    chip = chips.by_name(kind[4:-1])
    if chip is None or not chip.is_tpu:
        raise unknown(text)
    sides = slices.of_count(chip.name, count)
    if not sides:
        raise no_slice(text, chip.name, str(count), count)
    return parse_target(slices.name(chip.name, sides))


def batches(config: config_lib.Config, targets: Sequence[Target]) -> dict[str, list[int]]:
    """Return the batch of each size, by the kind of growth. Raises PlanError for parts of a row."""
    batch, first = config.train.batch, targets[0]
    weak = []
    for target in targets:
        rows, rest = divmod(batch * target.count, first.count)
        if rest:
            raise PlanError(
                f"{target.name} has {target.count} devices, and train.batch={batch} is that of the"
                f" {first.count} devices of {first.name}: {batch * target.count / first.count:g}"
                f" rows; make train.batch a multiple of {first.count}"
            )
        weak.append(rows)
    return {WEAK: weak, STRONG: [batch] * len(targets)}


def rows(
    config: config_lib.Config, targets: Sequence[Target], note: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the rows of each size, compiled, the smallest size first.

    ``note``: takes a line for each candidate that is settled. Raises PlanError without a compiler
    for the targets or their offloaded arrays, and for batches that are no whole rows.
    """
    if config.optim.offload and targets[0].kind == "gpu":
        raise PlanError(f"--scale compiles each size, but not with optim.offload: {NO_OFFLOAD}")
    of_growth = batches(config, targets)
    for number, target in enumerate(targets):
        known: dict[int, Settled] = {}  # by the batch
        for growth in of_growth:
            batch = of_growth[growth][number]
            if batch not in known:
                sized = replace(config, train=replace(config.train, batch=batch))

                def noted(line: str, name: str = f"{target.name}, {batch} rows") -> None:
                    note(f"{name}: {line}")

                known[batch] = _settled(sized, target, noted)
            yield Row(growth, target, batch, known[batch])


def _settled(config: config_lib.Config, target: Target, note: Callable[[str], None]) -> Settled:
    with worker.compiler(target, target.name) as compiler:
        if compiler is None:
            remedy = f"jaxtrain plan --setup {target.kind} fetches it"
            raise PlanError(f"--scale compiles each size, and no compiler is here; {remedy}")
        fields = tuple(path for path in config.train.auto if path != "mesh")
        try:
            if "mesh" in config.train.auto:
                search = Search(config, target, compiler, fields=fields, note=note)
                settled = _first_mesh(search)
            else:
                settled = _of_mesh(config, fields, target, compiler, note)
        except (layout_lib.LayoutError, PlanError) as error:  # of this size alone
            note(first_line(error))
            return Settled(Candidate(NOTHING, config, 0.0), float("inf"), first_line(error))
    if settled.is_unread:
        jaxlib, read = importlib.metadata.version("jaxlib"), environment.requirements("tpu")[0]
        raise PlanError(
            f"--scale compares the programs of each size, and jaxlib {jaxlib} cannot"
            f" read that of {target.name}: the libtpu here is newer than {read}; install that one"
        )
    return settled


def _of_mesh(
    config: config_lib.Config,
    fields: Sequence[str],
    target: Target,
    compiler: worker.Compiler,
    note: Callable[[str], None],
) -> Settled:
    """Settle the mesh of the config, with its first values that fit of the fields on auto."""
    if fields:
        config, line = decide(config, target, target.name)
        note(line)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    sizes = layout_lib.mesh_sizes(sizes, target.count, target.name)
    choice = Choice(tuple(zip(MESH, sizes, strict=True)))
    for path in fields:
        section, _, field = path.partition(".")
        choice |= Choice(((path, getattr(getattr(config, section), field)),))
    search = Search(config, target, compiler, fields=(), note=note)
    return search.settle(search.candidate(choice))


def _first_mesh(search: Search) -> Settled:
    """Return the first candidate that fits, else the one that lacks the least."""
    result = search.run(enough=1)
    if result.fitting:
        return result.best[0]
    nearest = result.nearest
    if nearest is None:
        reasons = [each.reason for each in result.failed] or list(result.refused)
        raise layout_lib.LayoutError(reasons[0] if reasons else "no mesh is allowed")
    return nearest
