"""What a run will hold, move and cost, before any of it exists, on devices that need not be here.

    python -m jaxtrain.main --config=… --plan                  # the devices of this machine
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4     # a TPU slice
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4*2   # two such slices
    python -m jaxtrain.main --config=… --plan=gpu:h100x8       # so many GPUs of one node or more
    python -m jaxtrain.main --config=… --plan=gpu:h100x8*4     # four nodes of eight
    jaxtrain plan --setup gpu                   # once: fetches the compiler (or tpu), which needs no such chip

Nothing here makes an array. What a device holds between steps is exact: the sum over the abstract state, with the tiles that
TPUs pad to. With the target's compiler at hand the real step is compiled, else what it needs is estimated from its jaxpr.

    target     devices to plan for                 estimate   what a step needs, from its jaxpr (graph, peak, peak_rules,
    abstract   a run on devices that need not be              lifetimes)
    memory     bytes of arrays, exactly            compile    what the target's compiler says (hlo: its program's text)
    remedies   changes with which a step fits      worker     the same in a process that has it (environment: fetches it)
    refuse     the check before a run              roofline   the least time of its program, by the datasheet
                                                   report     all of it, for a person
"""

from jaxtrain.assembly import Assembly, assemble
from jaxtrain.plan.abstract import abstractly
from jaxtrain.plan.compile import Compiled, compiled, compiler_options, tpu_devices
from jaxtrain.plan.environment import set_up
from jaxtrain.plan.errors import PlanError
from jaxtrain.plan.estimate import DOUBT, SLACK, Estimate, argument_bytes, estimate
from jaxtrain.plan.graph import Compiler
from jaxtrain.plan.lifetimes import Peak
from jaxtrain.plan.memory import device_bytes, held, host_memory, least, offloaded, padded
from jaxtrain.plan.peak import peak
from jaxtrain.plan.refuse import refuse_if_too_large
from jaxtrain.plan.remedies import remedies
from jaxtrain.plan.report import MFU, checkpoints, report
from jaxtrain.plan.target import Target, parse_target, refuse_unknown

__all__ = (
    "DOUBT", "MFU", "SLACK", "Assembly", "Compiled", "Compiler", "Estimate", "Peak", "PlanError", "Target", "abstractly",
    "argument_bytes", "assemble", "checkpoints", "compiled", "compiler_options", "device_bytes", "estimate", "held",
    "host_memory", "least", "offloaded", "padded", "parse_target", "peak", "refuse_if_too_large", "refuse_unknown", "remedies",
    "report", "set_up", "tpu_devices",
)  # fmt: skip
