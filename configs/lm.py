"""A language model on packed documents, of a published size, or from weights of Hugging Face.

    jaxtrain train --config=lm:qwen3-0.6b,corpus
    jaxtrain train --config=lm:path/to/Qwen2.5-0.5B,corpus-qwen --config.workdir=runs/qwen

The argument is a model, a comma, and a folder of token files or a text (loaders/text/tokens.py).
The model is a size of `jaxtrain.workloads.language.hugging_face.PRESETS`, which is initialised, or
a folder with config.json and safetensors, from Hugging Face or from `jaxtrain export`, whose
weights the run begins with. --config.data.sources mixes several corpora. The result is exported for
transformers by

    jaxtrain export runs/qwen --dtype bf16 --out Qwen2.5-0.5B-more

With adapters instead of all weights (--config.lora.rank=16 --config.optim.lr=2e-4) that exports the
merged weights, and `jaxtrain lora-to-peft` the adapters. On several devices --config.mesh.fsdp
splits parameters, --config.mesh.model heads, inner widths and vocabulary. Rows too long for one
device are split over the mesh axis fsdp by "--config.mesh.axis_rules={'batch': 'data', 'seq':
'fsdp'}".
"""

from typing import Any

from ml_collections import config_dict

from jaxtrain.workloads.language import hugging_face as language_files
from loaders.io import checks, files


def get_config(argument: str = "qwen3-0.6b") -> config_dict.ConfigDict:
    size_or_weights, _, corpus = argument.partition(",")
    context = 2048
    if size_or_weights in language_files.PRESETS:
        model = language_files.PRESETS[size_or_weights]
        warm_start: dict[str, Any] = {}
        lr = 6e-4
    elif not files.expanded(size_or_weights).exists():
        raise ValueError(
            f"{size_or_weights} is no folder and no size;"
            f" {checks.expected(size_or_weights, language_files.PRESETS)}"
        )
    else:
        model, warm_start = language_files.from_hugging_face(size_or_weights)
        lr = 3e-5
        context = model.get("context", context)  # of an export whose positions are learned
    return config_dict.create(
        workload="jaxtrain.workloads.language",
        loader="loaders.text.tokens",
        model=dict(model, context=context, remat="full", z_loss=1e-5),
        data=dict(context=context, sources=(dict(path=corpus),) if corpus else ()),
        train=dict(steps=10_000, batch=64, eval_every=1_000, eval_batches=50),
        # Embeddings, norms and biases do not decay: config.optim.undecayed.
        optim=dict(
            lr=lr,
            schedule="wsd",
            warmup=0.01,
            decay=0.2,
            decay_shape="sqrt",
            b2=0.95,
            weight_decay=0.1,
        ),
        warm_start=warm_start,
        checkpoint=dict(every=500),
    )
