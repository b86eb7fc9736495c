"""The part of a plan about exchanges between GPUs: their exposed time, and a better mesh.

data                    if a device has room for the whole state, and the sums of gradients
                        take less than `LITTLE` of the step
fsdp on a node,         else. The links of a node are faster than those between nodes, which
data over nodes         the gradients then cross once a step
accumulate=1            if fsdp gathers frozen matrices again for each microbatch
more overlap            if more than `TOO_MUCH` of the step is exposed, and the compiler
                        schedules it better with `MORE_OVERLAP`
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.plan import exposure, hlo, traffic
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.exposure import Exposure
from jaxtrain.plan.memory import in_bytes
from jaxtrain.plan.remedies import size
from jaxtrain.plan.target import Target

TOO_MUCH = 0.005  # exposed share of a step from which on other options are tried
LITTLE = 0.01  # share of a step
# Collectives that begin in the round of a loop before (XLA's level O1), and sums over the network
# that run next to the gathers within a node.
MORE_OVERLAP = {
    "optimization_level": "O1",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def measure(
    step: Compiled, assembly: Assembly, target: Target, rates: traffic.Rates
) -> Exposure | None:
    """Return the exposure of a step on several GPUs, None for other devices."""
    is_on_gpus = target.chip is not None and not target.chip.is_tpu
    if not (is_on_gpus and target.count > 1 and step.text):
        return None
    program = hlo.Program(step.text)
    mesh = dict(assembly.layout.mesh.shape)
    seconds = traffic.seconds_of_each(step.kernels, rates)
    return exposure.exposure(program, mesh, seconds, exposure.links_of(target, mesh))


def exposure_lines(found: Exposure) -> Iterator[str]:
    for axes, exchange in found.exchanges.items():
        if 1e3 * exchange.link >= 0.01:
            yield (
                f"  {1e3 * exchange.link:.2f} ms of the links over {'+'.join(axes)}, of which"
                f" {1e3 * exchange.exposed:.2f} ms are exposed"
            )
    yield (
        f"  {found.share:.1%} of the step is exposed, by the order of the program: an estimate to"
        " compare meshes and options"
    )


def changed_options(config: config_lib.Config, found: Exposure) -> config_lib.Config | None:
    """Return the config with options for more overlap, None if the step needs none or has them."""
    if found.share <= TOO_MUCH or set(MORE_OVERLAP) & set(config.compiler):
        return None
    return replace(config, compiler={**config.compiler, **MORE_OVERLAP})


def options_line(found: Exposure, better: Exposure, step: Compiled, target: Target) -> str:
    """Return a line that compares the options of `MORE_OVERLAP` with those of the config."""
    options = " ".join(f"--config.compiler.{name}={value}" for name, value in MORE_OVERLAP.items())
    figures = f"{1e3 * better.exposed:.2f} ms exposed, {in_bytes(step.peak)}"
    is_faster = better.computing + better.exposed < found.computing + found.exposed
    if is_faster and step.peak <= target.memory:
        return f"  more overlap: {figures} with {options}"
    return f"  no gain by {options}: {figures}, {1e3 * better.computing:.2f} ms of kernels"


def microbatch_lines(assembly: Assembly) -> Iterator[str]:
    """Yield the proposal of one microbatch, on GPUs and TPUs."""
    n = assembly.config.train.accumulate
    if assembly.layout.mesh.shape["fsdp"] > 1 and n > 1 and _is_mostly_frozen(assembly):
        yield (
            f"  frozen matrices are gathered for each of {n} microbatches:"
            f" --config.train.accumulate=1 sends 1/{n} of it, if it fits"
        )


def mesh_lines(assembly: Assembly, target: Target, found: Exposure, beyond: float) -> Iterator[str]:
    """Yield proposals of another mesh.

    ``beyond``: bytes of the compiled step beyond its lower bound.
    """
    config = assembly.config
    for sizes in _better_meshes(assembly, target, found):
        changed = replace(
            config,
            mesh=replace(config.mesh, data=sizes["data"], fsdp=sizes["fsdp"], model=sizes["model"]),
        )
        needs = size(changed, target, beyond)
        if needs <= target.memory:
            mesh_text = " ".join(f"--config.mesh.{name}={n}" for name, n in sizes.items())
            seconds = _sums(assembly, target, sizes["data"], sizes["fsdp"])
            yield (
                f"  a mesh that exchanges less: {mesh_text}, about {in_bytes(needs)},"
                f" {1e3 * seconds:.2f} ms of the links for sums over data"
            )
            return


def _is_mostly_frozen(assembly: Assembly) -> bool:
    table = assembly.task.specs
    return specs.count(table.frozen) > specs.count(table.params)


def _better_meshes(assembly: Assembly, target: Target, found: Exposure) -> Iterator[dict[str, int]]:
    """Yield the meshes that may be better than the assembly's, the best first."""
    mesh = assembly.layout.mesh.shape
    whole = {"data": target.count, "fsdp": 1, "model": 1}
    seconds = _sums(assembly, target, target.count, 1)
    if mesh["data"] < target.count and seconds < min(LITTLE * found.computing, found.link):
        yield whole
    per_node = exposure.links_of(target, mesh).per_node
    nodes = target.count // per_node
    fsdp_spans_nodes = mesh["fsdp"] * mesh["model"] > per_node
    if nodes > 1 and fsdp_spans_nodes:
        yield {"data": nodes, "fsdp": per_node, "model": 1}


def _sums(assembly: Assembly, target: Target, data: int, fsdp: int) -> float:
    """Return the seconds of the links for one float32 sum of all gradients over "data"."""
    links = exposure.links_of(target, {"data": data, "fsdp": fsdp, "model": 1})
    n_bytes = 4 * specs.count(assembly.task.specs.params) / fsdp
    group = [place * fsdp for place in range(data)]
    groups = [[place + i for place in group] for i in range(fsdp)]
    collective = hlo.Collective("all-reduce", (), int(n_bytes), groups, 1, False)
    return links.seconds(collective)
