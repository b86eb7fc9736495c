"""What XLA compiles the tests' programs with: machine code that is soon there, if slow.

They are tiny, and on a new machine each is compiled, those of several processes at every start (129
tests of steps and models from an empty cache: 514 s of CPU time without these flags, 332 s with
them; from a full one alike). What users get, XLA's own defaults, is what the installation's tests
and the demos run.
"""

import importlib.metadata

# An option that XLA does not know ends the process, and jaxlib 0.12 has it no more: without it,
# compiling takes longer there.
OLD_EMITTERS = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11)
SOON = f"--xla_backend_optimization_level=0{' --xla_cpu_use_fusion_emitters=false' if OLD_EMITTERS else ''}"
