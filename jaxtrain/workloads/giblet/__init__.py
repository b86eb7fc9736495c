"""An autoencoder of films and the fMRI of their viewers."""

from jaxtrain.workload import Command, Workload

_HERE = "jaxtrain.workloads.giblet"

WORKLOAD = Workload(
    config=f"{_HERE}.model:Config",
    make_task=f"{_HERE}.loss:make_task",
    make_specs=f"{_HERE}.model:make_specs",
    commands={
        "prepare-giblet": Command(
            f"{_HERE}.commands.prepare_giblet",
            "data",
            "make a dataset of a film and the brains of its viewers",
        ),
        "predict": Command(
            f"{_HERE}.commands.predict",
            "inference",
            "predict the fMRI of a film, as NIfTI",
            caches=True,
        ),
    },
    glossary=f"{_HERE}.glossary:GLOSSARY",
    examples=f"{_HERE}.loss:examples",
    export=f"{_HERE}.model:EXPORT",
)
