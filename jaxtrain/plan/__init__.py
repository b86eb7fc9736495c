"""What a run will hold, move and cost, before any of it exists, on devices that need not be here.

    python -m jaxtrain.main --config=… --plan                  # the devices of this machine
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4     # a TPU slice; its step is compiled here, by libtpu
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4*2   # two such slices
    python -m jaxtrain.main --config=… --plan=gpu:h100x8       # so many GPUs of one node or more

Nothing here makes an array. What a device holds between steps is exact: the sum over the abstract state, with the tiles that
TPUs pad to. Compiling for a TPU needs the package libtpu (extra: topology) and no TPU.

    target     devices to plan for                 estimate   what a step needs, from its jaxpr (graph, peak, peak_rules,
    assembly   a run put together on a mesh                   lifetimes)
    memory     bytes of arrays, exactly            compile    what the target's compiler says (hlo: its program's text)
    remedies   changes with which a step fits      refuse     the check before a run; report: all of it, for a person
"""

from jaxtrain.plan.assembly import Assembly, abstractly, assemble
from jaxtrain.plan.compile import Compiled, compiled, compiler_options, tpu_devices
from jaxtrain.plan.errors import PlanError
from jaxtrain.plan.estimate import DOUBT, SLACK, Estimate, argument_bytes, estimate
from jaxtrain.plan.memory import device_bytes, held, host_memory, least, offloaded, padded
from jaxtrain.plan.peak import Compiler, Peak, peak
from jaxtrain.plan.refuse import refuse_if_too_large
from jaxtrain.plan.remedies import remedies
from jaxtrain.plan.report import report
from jaxtrain.plan.target import Target, parse_target

__all__ = (
    "DOUBT", "SLACK", "Assembly", "Compiled", "Compiler", "Estimate", "Peak", "PlanError", "Target", "abstractly",
    "argument_bytes", "assemble", "compiled", "compiler_options", "device_bytes", "estimate", "held", "host_memory", "least",
    "offloaded", "padded", "parse_target", "peak", "refuse_if_too_large", "remedies", "report", "tpu_devices",
)  # fmt: skip
