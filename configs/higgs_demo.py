"""A small audio language model in two parts, which `make higgs-demo` runs one after the other.

The command is tools/demo_higgs.py.

    jaxtrain train --config=higgs_demo:base --config.data.manifest=… …
    jaxtrain train --config=higgs_demo:adapters --config.warm_start.source=… …

"base" trains everything on some classes of sound; "adapters" freezes that in bfloat16 and learns
others. The tool says where the data lie.
"""

from ml_collections import config_dict

from jaxtrain.workloads.audio_language import hugging_face as higgs


def get_config(argument: str = "base") -> config_dict.ConfigDict:
    adapters = argument == "adapters"
    return config_dict.create(
        workload="jaxtrain.workloads.audio_language",
        loader="loaders.chat.chat_audio",
        workdir=f"runs/higgs-demo/{argument}",
        model=dict(
            embed=128, depth=4, heads=4, kv_heads=2, mlp=384, dtype="float32", rope=dict(theta=1e4)
        ),
        data=dict(buckets=1),
        train=dict(steps=200 if adapters else 500, batch=16, eval_every=100),
        optim=dict(lr=2e-3, warmup=0.25 if adapters else 0.1, b2=0.95, weight_decay=0.05),
        lora=dict(higgs.ADAPTERS, rank=16, alpha=32.0) if adapters else {},
        checkpoint=dict(every=50),
        metrics=dict(every=20),
    )
