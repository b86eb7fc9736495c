"""Bird sound: a vision transformer over spectrograms, with labels or without."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.bird"

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.model:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        "index": Command(
            f"{_HERE}.commands.index", "data", "index recordings: folders, tables of annotations, hours-long files"
        ),
        "prepare": Command(
            f"{_HERE}.commands.prepare", "data", "decode recordings once, for training on many accelerators or few cores"
        ),
        "detect": Command(
            f"{_HERE}.commands.detect",
            "inference",
            "what is heard when: tables and scores of recordings of any length",
            caches=True,
        ),
        "fit": Command(
            f"{_HERE}.commands.fit", "inference", "a head for new classes, from few examples on embeddings", caches=True
        ),
        "search": Command(
            f"{_HERE}.commands.search",
            "inference",
            "windows of embeddings that sound like a clip, or that a head gives most",
            caches=True,
        ),
        "review": Command(
            f"{_HERE}.commands.review", "inference", "review the results of detect or search, on a page of this machine"
        ),
        "embed": Command(f"{_HERE}.commands.embed", "evaluate", "embed any dataset with a trained encoder", caches=True),
        "probe": Command(
            f"{_HERE}.commands.probe", "evaluate", "measure how good embeddings are: linear probe, k-NN, few shot"
        ),
        "benchmark": Command(
            f"{_HERE}.commands.benchmark",
            "evaluate",
            "score a run as BirdSet, ESC-10 or ESC-50 does, from their files",
            caches=True,
        ),
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.examples:examples",
    export=f"{_HERE}.export:EXPORT",
    formats={"timm": f"{_HERE}.export.timm:FORMAT", "onnx": f"{_HERE}.export.onnx:FORMAT"},
    needs={"onnx": "onnx"},
    foreign={r"(^|/)patch_embed/proj/weight$": f"{_HERE}.export.timm:FOREIGN"},
    next_steps=(("jaxtrain embed {run} --out {run}-embeddings", "for the features of recordings"),),
)
