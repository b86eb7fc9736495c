"""An audio language model (Higgs Audio): text and codes of sound, with adapters."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.audio_language"

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.loss:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        "train-codec": Command(
            f"{_HERE}.commands.train_codec", "data", "learn an audio codec from recordings"
        ),
        "encode-audio": Command(
            f"{_HERE}.commands.encode_audio",
            "data",
            "encode a manifest's recordings ahead of training",
            own_code=("--codec",),
        ),
        "generate-audio": Command(
            f"{_HERE}.commands.generate_audio",
            "inference",
            "answer prompts with sound, by an audio language model",
            caches=True,
            own_code=("--codec",),
        ),
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.examples:examples",
    export=f"{_HERE}.hugging_face:EXPORT",
)
