"""The fields of a config that it leaves to the plan, since they depend on the devices.

A choice is a function of the config and the target. So it is the same on every process and when a
run resumes. The run's config.json has it.

    model.unroll = 0    all layers at once on GPUs if they fit, else one (`remat.layers_at_once`)
"""

from dataclasses import replace

from jaxtrain.config import Config
from jaxtrain.nn import remat
from jaxtrain.parallel import cluster
from jaxtrain.plan.bound import bound
from jaxtrain.plan.target import Target, abstractly

# Most temporaries of written-out layers, relative to the lower bound of those of a loop. Compiled
# for an H100, a decoder of 1.24 B parameters has 1.08 of it, as much as its loop.
WRITTEN_OUT = 1.3


def resolve(config: Config, target: Target) -> Config:
    """Return the config with the values that it leaves to the plan. Raises as `assemble` does."""
    model = config.model
    if not getattr(model, "unroll_by_plan", False) or model.unroll:
        return config
    loop = replace(config, model=replace(model, unroll=1))
    if target.kind != "gpu":
        return loop
    assembly = abstractly(loop, target)
    at_once = remat.layers_at_once(0, model.depth, assembly.layout.shard)
    if at_once == 1:
        return loop
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    lower_bound = bound(assembly, traced, target)
    size = lower_bound.arguments + WRITTEN_OUT * lower_bound.temporaries + lower_bound.second
    fits = size <= target.memory
    if target.here:
        fits = bool(cluster.agree(fits))  # processes may see other limits of memory
    return replace(loop, model=replace(model, unroll=at_once)) if fits else loop
