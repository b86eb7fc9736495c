"""Bird sound: a vision transformer over spectrograms, with labels or without."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.bird"
_COMMANDS = {  # name -> group, help, whether it keeps a cache of programs
    "index": ("data", "index recordings: folders, tables of annotations, hours-long files", False),
    "prepare": (
        "data",
        "decode recordings once, for training on many accelerators or few cores",
        False,
    ),
    "detect": (
        "inference",
        "what is heard when: tables and scores of recordings of any length",
        True,
    ),
    "fit": ("inference", "a head for new classes, from few examples on embeddings", True),
    "search": (
        "inference",
        "windows of embeddings that sound like a clip, or that a head gives most",
        True,
    ),
    "review": (
        "inference",
        "review the results of detect or search, on a page of this machine",
        False,
    ),
    "embed": ("evaluate", "embed any dataset with a trained encoder", True),
    "probe": ("evaluate", "measure how good embeddings are: linear probe, k-NN, few shot", False),
    "benchmark": (
        "evaluate",
        "score a run as BirdSet, ESC-10 or ESC-50 does, from their files",
        True,
    ),
}
_FORMATS = """\
Encoders of sound have the formats `timm` (`timm.create_model` reads its config.json) and `onnx`.
The latter adds model.onnx and example_onnx.py: samples in, features and scores out, float32,
opset 20. Its metadata hold the sample rate, the number of samples and the classes.

    jaxtrain export runs/xcm --format timm --license cc-by-4.0 --out xcm-timm
    jaxtrain export runs/xcm --format onnx --out xcm-onnx
"""

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.model:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        name: Command(f"{_HERE}.commands.{name}", group, text, caches=caches)
        for name, (group, text, caches) in _COMMANDS.items()
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.examples:examples",
    export=f"{_HERE}.export:EXPORT",
    formats={"timm": f"{_HERE}.export.timm:FORMAT", "onnx": f"{_HERE}.export.onnx:FORMAT"},
    needs={"onnx": "onnx"},
    formats_help=_FORMATS,
    foreign={r"(^|/)patch_embed/proj/weight$": f"{_HERE}.export.timm:FOREIGN"},
    next_steps=(("jaxtrain embed {run} --out {run}-embeddings", "for the features of recordings"),),
)
