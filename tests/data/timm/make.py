"""Write the golden numbers of timm's vision transformers: python -m tests.data.timm.make, with
timm 1.0.31 and torch 2.15.0 (CPU).

image/, pooled/    a folder as timm, and one as Bird-MAE is published: model.safetensors,
                   config.json
image.npz, pooled.npz    x float32 [B, 1, frames, mels]; tokens float32 [B, 1 + registers + N, D],
                         and features [B, D], by timm
out.npz            of tests/support/timm_export.py, which timm loaded: x, and features and logits by
                   timm; also the loaded config.json, and the shapes of its arrays by their names
"""

import json
import pathlib
import tempfile

import numpy as np
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.support import timm_export

HERE = pathlib.Path(__file__).parent
SIZES = dict(img_size=(64, 32), patch_size=16, in_chans=1, embed_dim=32, depth=2, num_heads=4)


def random_model(seed: int, **options) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = timm.models.vision_transformer.VisionTransformer(
        num_classes=0, **SIZES, **options
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name and "weight" in name), 0.2)
    return model


def main() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 1, 64, 32), np.float32))

    options = dict(reg_tokens=2, qk_norm=True, init_values=0.5, global_pool="token")
    model = random_model(1, **options)
    about = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 0,
        "model_args": {**SIZES, **options},
    }
    write("image", model.state_dict(), about)
    with torch.no_grad():
        tokens = model.forward_features(x)
    np.savez_compressed(
        HERE / "image.npz", x=x.numpy(), tokens=tokens.numpy(), features=tokens[:, 0].numpy()
    )

    model = random_model(2, global_pool="avg")
    with torch.no_grad():
        model.pos_embed[:, 1:] = torch.from_numpy(sin_cos(32, (4, 2)))
        tokens = model.forward_features(x)
        features = model.forward_head(tokens, pre_logits=True)
    # Bird-MAE keeps these
    state = {**model.state_dict(), "norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}
    about = {
        "img_size_x": 64,
        "img_size_y": 32,
        "patch_size": 16,
        "num_heads": 4,
        "norm_layer_eps": 1e-6,
        "pos_trainable": False,
    }
    write("pooled", state, about)
    np.savez_compressed(
        HERE / "pooled.npz", x=x.numpy(), tokens=tokens.numpy(), features=features.numpy()
    )

    with tempfile.TemporaryDirectory() as scratch:
        folder = timm_export.exported(pathlib.Path(scratch))
        model = load(folder)
        shapes = {
            name: list(x.shape)
            for name, x in sorted(load_file(folder / "model.safetensors").items())
        }
        config = (folder / "config.json").read_text()
    x = torch.from_numpy(
        np.random.default_rng(1).standard_normal(
            (2, 1, *json.loads(config)["model_args"]["img_size"]), np.float32
        )
    )
    with torch.no_grad():
        features = model.forward_head(model.forward_features(x), pre_logits=True)
        logits = model(x)
    np.savez_compressed(
        HERE / "out.npz",
        x=x.numpy(),
        features=features.numpy(),
        logits=logits.numpy(),
        shapes=json.dumps(shapes),
        config=config,
    )


def load(folder: pathlib.Path) -> torch.nn.Module:
    """Load an export with timm alone."""
    config = json.loads((folder / "config.json").read_text())
    model = timm.create_model(
        config["architecture"], num_classes=config["num_classes"], **config["model_args"]
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = config["norm_eps"]
    return model.eval()


def sin_cos(width: int, grid: tuple[int, int]) -> np.ndarray:
    """Fixed positions, as in masked autoencoders."""
    frequency = 10000.0 ** (-np.arange(width // 4) / (width / 4))
    time, mel = (
        x.reshape(-1, 1) * frequency for x in np.meshgrid(*map(np.arange, grid), indexing="ij")
    )
    return np.concatenate([np.sin(mel), np.cos(mel), np.sin(time), np.cos(time)], 1).astype(
        np.float32
    )


def write(name: str, state: dict, about: dict) -> None:
    (HERE / name).mkdir(exist_ok=True)
    save_file(
        {key: value.contiguous() for key, value in state.items()}, HERE / name / "model.safetensors"
    )
    (HERE / name / "config.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
