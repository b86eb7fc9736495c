"""Every config.guard.verify_every-th step computed twice, to find a device that computes wrong.

Both times the same program begins with the same state and batch. On a mesh of several devices the
second computation runs one device further along the mesh: each part of every array is on its
neighbour, so that a device which always errs cannot err alike in both. The program is the same, and
so are the orders of its sums: on CPUs and TPUs the bits are the same. A GPU's collectives may add
in another order on permuted devices. If the first verified step of a start shows that, the second
computation uses the same placement from then on. On one device both computations are its own, and
only an error that does not repeat is found.

The digests of the new states are compared, device by device, so that replicas are compared too. If
they differ, a third computation decides. The devices whose parts of the wrong state differ are
named. An error in a gradient reaches all devices by the sum over them, and then all are named.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import assembly as assembly_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint.checkpointer import saved_parts
from jaxtrain.run.metrics_logger import MetricsLogger
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.stream import Data, Item
from jaxtrain.step import digest
from jaxtrain.step import state as state_lib
from jaxtrain.step.state import TrainState
from jaxtrain.types import Array, PyTree
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")
Step = Callable[[TrainState, Any, Array], tuple[TrainState, Any]]


class WrongStepError(UserError, RuntimeError):
    """A step computed twice gave different states, and config.guard.on_mismatch stops the run."""


class Outcome(NamedTuple):
    """The digests of a computed state: uint32 [devices of the mesh, arrays, 2]."""

    parts: np.ndarray
    mesh: Any  # its own, of real devices

    def devices(self, right: "Outcome") -> list[str]:
        wrong = (self.parts != right.parts).any((1, 2))
        return [
            f"{d.device_kind} {d.id} of process {d.process_index}"
            for d in self.mesh.devices.reshape(-1)[wrong]
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and np.array_equal(self.parts, other.parts)


class Verifier:
    """Computes the steps of a run that are to be verified.

    ``steps`` were computed twice, and in ``wrong`` of them the computations differed.
    """

    def __init__(
        self, assembly: Assembly, data: Data, programs: StepCompiler, metrics_logger: MetricsLogger
    ):
        self._assembly, self._data, self._programs, self._log = (
            assembly,
            data,
            programs,
            metrics_logger,
        )
        self._guard = assembly.config.guard
        self._paths = specs.paths(saved_parts(assembly.abstract.state))
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self.steps = self.wrong = 0
        mesh, self._there = assembly.layout.mesh, assembly
        if self._guard.verify_every and mesh.size > 1:
            turned = np.roll(mesh.devices.reshape(-1), -1).reshape(mesh.devices.shape)
            self._there = assembly_lib.assemble(
                assembly.config, Mesh(turned, mesh.axis_names, axis_types=mesh.axis_types)
            )

    def is_due(self, step: int) -> bool:
        return bool(self._guard.verify_every) and step % self._guard.verify_every == 0

    def __call__(
        self, step: Step, state: TrainState, item: Item, stop: Array
    ) -> tuple[TrainState, Any]:
        """Compute a step of the run twice, with a second state meanwhile, and return its result.

        Raises WrongStepError: the results differ, and the policy is to stop, or a third computation
        agrees with none.
        """
        here = self._assembly
        second = self._second(step, state, item, stop)
        new, out = step(self._copy(state), item.arrays, stop)
        first = self._outcome(here, new)
        self.steps += 1
        if first == second:
            self._log.verified(item.step, wrong=False)
            return new, out
        del new, out  # the state is needed twice more, and not three times
        new, out = step(self._copy(state), item.arrays, stop)
        third = self._outcome(here, new)
        repeats = (
            third == first
            and self._there is not here
            and self._second(step, state, item, stop) == second
        )
        if repeats and self.steps == 1 and (first.parts != second.parts).any((1, 2)).all():
            log.warning(
                "step %d: each placement of its rows on devices gives bits of its own, again and"
                " again. Either the collectives of these devices add in another order there, or a"
                " device always computes wrong, which jaxtrain doctor finds. Steps are verified in"
                " the same placement from now on",
                item.step,
            )
            self._there = here
            self._log.verified(item.step, wrong=False)
            return new, out
        self.wrong += 1
        self._log.verified(item.step, wrong=True)
        self._report(item.step, first, second, third, repeats=repeats)
        return new, out

    def _report(
        self, step: int, first: Outcome, second: Outcome, third: Outcome, *, repeats: bool
    ) -> None:
        arrays = [
            p
            for p, one, two in zip(
                self._paths, first.parts.swapaxes(0, 1), second.parts.swapaxes(0, 1), strict=True
            )
            if (one != two).any()
        ]
        text = (
            f"step {step} was computed twice from the same state, and {len(arrays)} of"
            f" {len(self._paths)} arrays differ"
        )
        text = f"{text}: {', '.join(arrays[:3])}{' …' if len(arrays) > 3 else ''}"
        if third not in (first, second):
            raise WrongStepError(
                f"{text}. A third computation agrees with neither: no result can be trusted. Check"
                " the devices with jaxtrain doctor; the same command resumes from the last"
                " checkpoint"
            )
        if repeats:
            always = sorted({*first.devices(second)} & {*second.devices(first)}) or first.devices(
                second
            )
            raise WrongStepError(
                f"{text}, in each placement of its rows on devices again and again:"
                f" {', '.join(always)} always computes wrong. The same command resumes from the"
                " last checkpoint, and must do so without that device"
            )
        wrong, which = (second, "second") if third == first else (first, "first")
        devices = wrong.devices(third)
        text = (
            f"{text}. A third computation says that the {which} was wrong, on {', '.join(devices)}"
        )
        if len(devices) == wrong.mesh.size > 1:
            text = f"{text} (one of them, whose error the sum over devices brought to all)"
        if self._guard.on_mismatch == "stop":
            raise WrongStepError(
                f"{text}. Nothing of it is saved: the same command resumes from the last"
                " checkpoint, if possible without that device; with"
                " config.guard.on_mismatch=continue the run takes the right result instead"
            )
        log.error("%s. The run continues with the right result", text)

    def _second(self, step: Step, state: TrainState, item: Item, stop: Array) -> Outcome:
        there = self._there
        if there is self._assembly:
            return self._outcome(there, step(self._copy(state), item.arrays, stop)[0])
        moved = _moved(
            (state, dict(item.arrays), stop), self._assembly.layout.mesh, there.layout.mesh
        )
        return self._outcome(
            there, self._program(self._assembly.task.stage(item.index), item.bucket)(*moved)[0]
        )

    @functools.cache  # noqa: B019  one for each run
    def _program(self, stage: Any, bucket: int) -> Step:
        there, fields = self._there, self._data.train.buckets[bucket]
        batch = state_lib.make_batch(there.task, there.layout, fields, there.config.train.batch)
        return self._programs.compile(there.with_batch(batch).trace(stage).lower())

    def _outcome(self, assembly: Assembly, state: TrainState) -> Outcome:
        mesh, parts = assembly.layout.mesh, saved_parts(state)
        return Outcome(np.asarray(jax.device_get(_digests(mesh, *_partitions(parts))(parts))), mesh)


def _partitions(tree: PyTree) -> tuple[Any, tuple[PartitionSpec, ...]]:
    """Return a tree's structure and its arrays' partitions, by which its programs are kept."""
    arrays, structure = jax.tree.flatten(tree)
    return structure, tuple(x.sharding.spec for x in arrays)


@functools.cache  # else each verified step would compile it again
def _digests(
    mesh: Any, structure: Any, partitions: tuple[PartitionSpec, ...]
) -> Callable[[PyTree], Array]:
    """Return the function state -> digests of the parts that each device holds, on every device."""
    own = jax.shard_map(
        lambda parts: digest.of_each(parts)[None], mesh=mesh, in_specs=(jax.tree.unflatten(structure, partitions),),
        out_specs=PartitionSpec(mesh.axis_names), check_vma=False,
    )  # fmt: skip
    return jax.jit(own, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _shift(
    mesh: Any, structure: Any, partitions: tuple[PartitionSpec, ...]
) -> Callable[[PyTree], PyTree]:
    """Return the function that sends each part of each array to the next device of the mesh."""
    steps = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    specs = jax.tree.unflatten(structure, partitions)

    def shift(parts: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh.axis_names, steps), parts)

    return jax.jit(
        jax.shard_map(shift, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )


def _moved(tree: PyTree, mesh: Any, there: Any) -> PyTree:
    """Move arrays of ``mesh`` to ``there``, whose device at each place is the next of ``mesh``."""
    sent = _shift(mesh, *_partitions(tree))(tree)
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(
            x.shape,
            NamedSharding(there, x.sharding.spec),
            [part.data for part in x.addressable_shards],
        ),
        sent,
    )
