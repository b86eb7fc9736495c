"""The XLA options for the tests' programs: machine code that compiles quickly, even if it runs
slowly.

The programs are tiny. On a new machine each is compiled, and those of several processes at every
start. 129 tests of steps and models from an empty cache took 514 s of CPU time without these flags,
and 332 s with them. From a full cache there was no difference. Users get XLA's own defaults, which
the installation's tests and the demos run.
"""

import importlib.metadata

# An option that XLA does not know ends the process, and jaxlib 0.12 no longer has it. Without it,
# compilation takes longer there.
OLD_EMITTERS = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11)
# The variables of a process that keeps its programs where the tests do.
KEEPS_PROGRAMS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
SOON = "--xla_backend_optimization_level=0"
if OLD_EMITTERS:
    SOON += " --xla_cpu_use_fusion_emitters=false"
