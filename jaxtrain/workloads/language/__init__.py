"""Language models on packed documents."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.language"

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.loss:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        "tokens": Command(
            f"{_HERE}.commands.tokens", "data", "make token files of text, JSONL, Parquet or Arrow"
        ),
        "generate": Command(
            f"{_HERE}.commands.generate",
            "inference",
            "continue prompts with a language model",
            caches=True,
        ),
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.text:examples",
    export=f"{_HERE}.hugging_face:EXPORT",
)
