"""The tiny recursive model on Sudoku."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.trm"

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.loss:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        "sudoku": Command(f"{_HERE}.commands.sudoku", "data", "generate puzzles with one solution"),
        "solve": Command(
            f"{_HERE}.commands.solve",
            "inference",
            "solve puzzles with a recursive model",
            caches=True,
        ),
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.loss:examples",
    export=f"{_HERE}.model:EXPORT",
)
