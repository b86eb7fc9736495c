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
from jaxtrain.run.step_compiler import Key, StepCompiler
from jaxtrain.run.stream import Data, Item
from jaxtrain.step import digest
from jaxtrain.step import state as state_lib
from jaxtrain.step.state import TrainState
from jaxtrain.types import Array, PyTree
from loaders.io.checks import FatalError

log = logging.getLogger("jaxtrain")
Step = Callable[[TrainState, Any, Array], tuple[TrainState, Any]]


class WrongStepError(FatalError, RuntimeError):
    """A step computed twice gave different states, and config.guard.on_mismatch stops the run."""


class Outcome(NamedTuple):
    """The digests of a computed state: uint32 [devices of the mesh, arrays, 2]."""

    parts: np.ndarray
    mesh: Any  # its own, of real devices

    def devices(self, right: "Outcome") -> list[str]:
        is_wrong = self.differs(right).any(1)
        return [
            f"{d.device_kind} {d.id} of process {d.process_index}"
            for d in self.mesh.devices.reshape(-1)[is_wrong]
        ]

    def differs(self, other: "Outcome") -> np.ndarray:
        """Return bool [devices of the mesh, arrays]."""
        differs: np.ndarray = (self.parts != other.parts).any(2)
        return differs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and np.array_equal(self.parts, other.parts)


class Verifier:
    """Computes the steps of a run that are to be verified.

    ``steps`` were computed twice, and in ``wrong`` of them the computations differed.
    """

    def __init__(
        self, assembly: Assembly, data: Data, programs: StepCompiler, metrics_logger: MetricsLogger
    ):
        self._assembly = assembly
        self._data = data
        self._compiler = programs
        self._log = metrics_logger
        self._guard = assembly.config.guard
        self._paths = specs.paths(saved_parts(assembly.abstract.state))
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self.steps = 0
        self.wrong = 0
        self._turned = assembly  # for the second computation
        self._turned_programs: dict[Key, Step] = {}
        mesh = assembly.layout.mesh
        if self._guard.verify_every and mesh.size > 1:
            turned_devices = np.roll(mesh.devices.reshape(-1), -1).reshape(mesh.devices.shape)
            turned_mesh = Mesh(turned_devices, mesh.axis_names, axis_types=mesh.axis_types)
            self._turned = assembly_lib.assemble(assembly.config, turned_mesh)

    def is_due(self, step: int) -> bool:
        return bool(self._guard.verify_every) and step % self._guard.verify_every == 0

    def __call__(
        self, step: Step, state: TrainState, item: Item, stop: Array
    ) -> tuple[TrainState, Any]:
        """Compute a step of the run twice, with a second state meanwhile, and return its result.

        Raises WrongStepError: the results differ, and the policy is to stop, or a third computation
        agrees with none.
        """
        second = self._second(step, state, item, stop)
        new, out = step(self._copy(state), item.arrays, stop)
        first = self._outcome(self._assembly, new)
        self.steps += 1
        if first == second:
            self._log.verified(item.step, wrong=False)
            return new, out
        del new, out  # the state is needed twice more, and not three times
        new, out = step(self._copy(state), item.arrays, stop)
        third = self._outcome(self._assembly, new)
        repeats = (
            third == first
            and self._turned is not self._assembly
            and self._second(step, state, item, stop) == second
        )
        if repeats and self.steps == 1 and first.differs(second).any(1).all():
            log.warning(
                "step %d: each placement of its rows on devices gives bits of its own, again and"
                " again. Either the collectives of these devices add in another order there, or a"
                " device always computes wrong, which jaxtrain doctor finds. Steps are verified in"
                " the same placement from now on",
                item.step,
            )
            self._turned = self._assembly
            self._log.verified(item.step, wrong=False)
            return new, out
        self.wrong += 1
        self._log.verified(item.step, wrong=True)
        self._report(item.step, first, second, third, repeats=repeats)
        return new, out

    def _report(
        self, step: int, first: Outcome, second: Outcome, third: Outcome, *, repeats: bool
    ) -> None:
        differ = first.differs(second)
        arrays = [path for i, path in enumerate(self._paths) if differ[:, i].any()]
        text = (
            f"step {step} was computed twice from the same state, and {len(arrays)} of"
            f" {len(self._paths)} arrays differ: {', '.join(arrays[:3])}"
        )
        if len(arrays) > 3:
            text = f"{text} …"
        if third not in (first, second):
            raise WrongStepError(
                f"{text}. A third computation agrees with neither: no result can be trusted. Check"
                " the devices with jaxtrain doctor; the same command resumes from the last"
                " checkpoint"
            )
        if repeats:
            # the device that errs is the same in both placements
            always = sorted({*first.devices(second)} & {*second.devices(first)})
            names = ", ".join(always or first.devices(second))
            raise WrongStepError(
                f"{text}, in each placement of its rows on devices again and again:"
                f" {names} always computes wrong. The same command resumes from the"
                " last checkpoint, and must do so without that device"
            )
        if third == first:
            wrong, ordinal = second, "second"
        else:
            wrong, ordinal = first, "first"
        devices = wrong.devices(third)
        names = ", ".join(devices)
        text = f"{text}. A third computation says that the {ordinal} was wrong, on {names}"
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
        turned = self._turned
        if turned is self._assembly:
            new, _ = step(self._copy(state), item.arrays, stop)
            return self._outcome(turned, new)
        arguments = (state, dict(item.arrays), stop)
        moved = _move(arguments, self._assembly.layout.mesh, turned.layout.mesh)
        has_norms = self._assembly.has_norms(item.index + 1)
        program = self._program((self._assembly.task.stage(item.index), item.bucket, has_norms))
        new, _ = program(*moved)
        return self._outcome(turned, new)

    def _program(self, key: Key) -> Step:
        """Return the step's program on the turned mesh, compiled at the first call."""
        if key not in self._turned_programs:
            stage, bucket, has_norms = key
            turned, fields = self._turned, self._data.train.buckets[bucket]
            rows = turned.config.train.batch
            batch = state_lib.make_batch(turned.task, turned.layout, fields, rows)
            lowered = turned.with_batch(batch).trace(stage, has_norms=has_norms).lower()
            self._turned_programs[key] = self._compiler.compile(lowered)
        return self._turned_programs[key]

    def _outcome(self, assembly: Assembly, state: TrainState) -> Outcome:
        mesh, parts = assembly.layout.mesh, saved_parts(state)
        digests = _digests(mesh, *_partitions(parts))(parts)
        return Outcome(np.asarray(jax.device_get(digests)), mesh)


def _partitions(tree: PyTree) -> tuple[Any, tuple[PartitionSpec, ...]]:
    """Return a tree's structure and its arrays' partitions, by which its programs are kept."""
    arrays, structure = jax.tree.flatten(tree)
    return structure, tuple(x.sharding.spec for x in arrays)


@functools.cache  # else each verified step would compile it again
def _digests(
    mesh: Any, structure: Any, partitions: tuple[PartitionSpec, ...]
) -> Callable[[PyTree], Array]:
    """Return the function state -> digests of the parts that each device holds, on every device."""

    def digests_of_device(parts: PyTree) -> Array:
        return digest.of_each(parts)[None]

    digests = jax.shard_map(
        digests_of_device,
        mesh=mesh,
        in_specs=(jax.tree.unflatten(structure, partitions),),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(digests, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _shift(
    mesh: Any, structure: Any, partitions: tuple[PartitionSpec, ...]
) -> Callable[[PyTree], PyTree]:
    """Return the function that sends each part of each array to the next device of the mesh."""
    pairs = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    specs = jax.tree.unflatten(structure, partitions)

    def shift(parts: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh.axis_names, pairs), parts)

    return jax.jit(
        jax.shard_map(shift, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )


def _move(tree: PyTree, mesh: Any, turned: Any) -> PyTree:
    """Move arrays of ``mesh`` to ``turned``, whose device at each place is the next of ``mesh``."""

    def relabel(x: Any) -> jax.Array:
        sharding = NamedSharding(turned, x.sharding.spec)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(relabel, _shift(mesh, *_partitions(tree))(tree))
