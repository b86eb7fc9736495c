"""Compile the program that makes a run's first state, for chips that need not be here.

    python -m tests.support.start_program TARGET CONFIG OVERRIDES

OVERRIDES are JSON: [["mesh.fsdp", "-1"], …]. The compiler's packages come first in PYTHONPATH.
The last line is JSON: bytes of a device's state, and of what the program holds next to it.
"""

import json
import sys

import jax

from jaxtrain.assembly import assemble
from jaxtrain.parallel import layout
from jaxtrain.plan import compile as compile_lib
from jaxtrain.plan.target import parse_target
from jaxtrain.step import state as state_lib
from tests.support.host_parts import config_of


def main(text: str, source: str, overrides: str) -> None:
    target = parse_target(text)
    devices_of = compile_lib.tpu_devices if target.kind == "tpu" else compile_lib.gpu_devices
    devices = devices_of(target)
    config = config_of(source, overrides)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    assembly = assemble(config, layout.make_mesh(*sizes, devices=devices))
    init = state_lib.make_init(
        assembly.task, assembly.tx, assembly.abstract, start=lambda params, given: params
    )
    memory = init.lower(jax.random.key(0), ()).compile().memory_analysis()
    found = {"state": memory.output_size_in_bytes, "temporaries": memory.temp_size_in_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
