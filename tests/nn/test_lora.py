"""Which parameters get adapters, are trained themselves, or stay as they are."""

import pytest

from jaxtrain.config import Lora
from jaxtrain.nn import lora, transformer
from jaxtrain.specs import ones, zeros
from jaxtrain.types import Spec

DECODER = transformer.Decoder(
    embed=32, depth=3, heads=8, kv_heads=2, head_dim=4, mlp=48, qk_norm=True
)


def test_every_parameter_must_be_sorted():
    blocks = {**transformer.attention_specs(DECODER), **transformer.feed_forward_specs(DECODER)}
    w = Spec((64, 32), (None, "embed"), zeros)
    table = {"embed": w, "blocks": blocks, "scale": Spec((32,), ("embed",), ones), "w_head": w}
    kinds = lora.sort(
        Lora(rank=1, adapt=r"w_[qv]$", train="^scale$", freeze=r"/(scale|w_[^qv])|embed|w_head"),
        table,
    )
    assert {path for path, kind in kinds.items() if kind == "adapt"} == {"blocks/w_q", "blocks/w_v"}
    assert kinds["scale"] == "train" and kinds["embed"] == "freeze"
    with pytest.raises(lora.LoraError) as error:
        lora.sort(Lora(rank=1, adapt="blocks/", train="w_up", freeze="^embed$"), table)
    for text in (
        "'w_head' matches none of",
        "'blocks/w_up' matches lora.adapt",
        "'blocks/scale_mlp' [3, 32] is not a matrix",
    ):
        assert text in str(error.value)
    with pytest.raises(lora.LoraError, match="matches no parameter"):
        lora.sort(Lora(rank=1, adapt="nothing", freeze="."), table)
