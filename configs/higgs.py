"""Higgs Audio v2 (5.8 billion parameters), with adapters of rank 32 (78.9 million) trained.

    jaxtrain train --config=higgs:path/to/weights \
        --config.data.manifest=manifest.json \
        --config.data.tokenizer=path/to/weights/tokenizer.json --config.data.codec=codec.npz
    jaxtrain train --config=higgs:blank --config.train.batch=64 \
        --plan=gpu:h100x8  # the published size

The argument is a folder with config.json and safetensors, from elsewhere or of `jaxtrain export`:
the frozen base, which every device reads its part of, rounded to bfloat16. "blank" has the
published sizes, nothing to begin with and conversations of silence, to plan and to measure with.
At 40 % of the peak that is 34,000 tokens/s on one H100 and 272,000 on eight, says the plan (padding
included). loaders/chat/chat_audio.py has the manifest's format and the three ways to codes. What
was trained is exported by

    jaxtrain lora-to-peft runs/higgs --out adapters  # for peft
    jaxtrain export runs/higgs --dtype bf16 --out merged  # the weights, under their own names

Other choices of the model: --config.model.audio_attention=true (a second attention, of columns
alone), average_codes=true, and of the data delay=false; none of the three is how the published
weights were made. `make higgs-demo` is a whole small run.
"""

from typing import Any

from ml_collections import config_dict

from jaxtrain.workloads.audio_language import hugging_face as higgs


def get_config(argument: str = "blank") -> config_dict.ConfigDict:
    if argument == "blank":
        from loaders.chat import demo_chat

        warm_start: dict[str, Any] = {}
        model, data = higgs.PRESETS["v2"], demo_chat.blank()
    else:
        (model, warm_start), data = higgs.from_hugging_face(argument), {}
    return config_dict.create(
        workload="jaxtrain.workloads.audio_language",
        loader="loaders.chat.chat_audio",
        model=dict(model, remat="auto"),
        data=data,
        train=dict(steps=2_000, batch=32, accumulate="auto", eval_every=500),
        optim=dict(lr=2e-4, schedule="cosine", warmup=0.05, b2=0.95, weight_decay=0.01, clip=1.0),
        lora=higgs.ADAPTERS,
        warm_start=warm_start,
        checkpoint=dict(every=500),
        metrics=dict(every=30),
    )
