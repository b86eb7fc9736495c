"""The memory, time and problems of a run, before it exists, on devices that need not be here.

A plan (`jaxtrain plan --help`) makes no array. The bytes that a device holds between steps are
exact. A lower bound of a step's memory is read from its jaxpr. The compiler of the devices, which
needs no such chip, has the other figures: it compiles the real step.

    target    the devices to plan for          compile      the compiler's figures of a step
    memory    bytes of arrays, exactly         hlo          the text of a compiled program
    bound     the lower bound of a step        worker       compiles in a process of its own
    remedies  the check before a run, and      environment  fetches that process's compiler
              changes that may make it fit     plan_cache   keeps compilers' answers
    summary   all of it, for a person          gpu_specs    GPUs that need not be here
    choices   what a config leaves to it       auto         microbatches and recomputation
    exposure  exchanges that nothing hides     mesh_advice  a mesh that exposes less
    forecast  the time of a step               kinds        of kernels, for a forecast
    mesh_search  the fastest mesh, options     mesh_report  the search, for a person
    candidates   the meshes and options
    estimate  a time before the program        slices       the slices of TPUs that exist
    cpu_work  of kernels on CPUs               calibration  what it costs on this machine
    scale     one run on many sizes            scale_report  its tables, for a person
    hosts     rows, files, disks, processes    traffic  the bytes of each kernel
    attention_work  cuDNN's products
"""

from jaxtrain.plan.auto import decide, decide_once
from jaxtrain.plan.calibration import calibrate
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.environment import set_up
from jaxtrain.plan.hosts import checkpoints, free_space
from jaxtrain.plan.mesh_report import report as report_search
from jaxtrain.plan.remedies import refuse_if_too_large
from jaxtrain.plan.scale_report import report as report_scale
from jaxtrain.plan.summary import report
from jaxtrain.plan.target import PlanError, Target, abstractly, parse_target

__all__ = (
    "PlanError",
    "Target",
    "abstractly",
    "calibrate",
    "checkpoints",
    "decide",
    "decide_once",
    "free_space",
    "parse_target",
    "refuse_if_too_large",
    "report",
    "report_scale",
    "report_search",
    "resolve",
    "set_up",
)
