"""The adapters of a run with config.lora, in peft's format.

    python -m tools.lora_to_peft RUN [--step N] --out DIR

    DIR/
      adapter_model.safetensors     base_model.model.<module>.lora_A.weight [rank, in] and .lora_B.weight [out, rank] of each
                                    adapted matrix of each layer
      adapter_config.json           rank, alpha, the modules, and the weights that they belong to

for workloads whose matrices are exported as (out, in) under names that end in ".weight" (jaxtrain.workloads.language). The
merged weights are what tools/orbax_to_safetensors.py makes of such a run.
"""

import argparse
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import lora
from jaxtrain.checkpoint import read as stored
from jaxtrain.checkpoint.read import StoredError
from tools import orbax_to_safetensors as safetensors

SIDES = {lora.A: "lora_A", lora.B: "lora_B"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.lora_to_peft", description="The adapters of a run, in peft's format.")
    parser.add_argument("run", metavar="RUN", help="a workdir or a step directory")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--step", type=int, help="default: the newest")
    args = parser.parse_args(argv)
    try:
        print(export(args.run, args.out, step=args.step))
    except StoredError as error:
        print(f"tools.lora_to_peft: {error}", file=sys.stderr)
        return 2
    return 0


def export(run: str, out: str, *, step: int | None = None) -> str:
    """Writes the folder ``out``. Returns a line about it. Raises StoredError: no such step, no adapters, no names for them."""
    step_dir = stored.find_step(run, step)
    config = (stored.read_json(step_dir, "meta") or {}).get("config", {})
    arrays = {p.removeprefix("params/"): one for p, one in stored.open_step(step_dir).items() if p.startswith("params/")}
    adapters = {path: one for path, one in arrays.items() if lora.is_adapter(path)}
    if not adapters:
        raise StoredError(
            f"{step_dir} holds no adapters: config.lora.rank was 0; tools.orbax_to_safetensors exports its weights"
        )
    try:
        names = importlib.import_module(config["workload"]).export_names
    except (ImportError, AttributeError) as error:
        raise StoredError(f"{config['workload']} gives no names to export ({error})") from error
    found: dict[str, np.ndarray] = {}
    for path, one in adapters.items():
        matrix, _, side = path.rpartition("/")
        modules = names(config["model"], matrix)
        x = one.read(())
        for name, part in zip(
            [modules] if isinstance(modules, str) else modules, [x] if isinstance(modules, str) else x, strict=True
        ):
            if not name.endswith(".weight"):
                raise StoredError(
                    f"{matrix} is exported as {name!r}, which is no module's weight, so that peft knows no adapter for it"
                )
            part = part.reshape(part.shape[0], -1) if side == lora.A else part.reshape(-1, part.shape[-1])
            found[f"base_model.model.{name.removesuffix('.weight')}.{SIDES[side]}.weight"] = part
    target = pathlib.Path(out).expanduser().absolute()
    if target.exists() and any(target.iterdir()):
        raise StoredError(f"{target} is not empty; choose another --out")
    target.mkdir(parents=True, exist_ok=True)
    entries = [safetensors.Entry(name, name, found[name].shape, found[name].dtype) for name in sorted(found)]
    with (target / "adapter_model.safetensors").open("wb") as file:
        file.write(safetensors.header(entries, "pt"))
        for entry in entries:
            file.write(np.ascontiguousarray(found[entry.name]).tobytes())
    (target / "adapter_config.json").write_text(json.dumps(_config(config, found), indent=2, sort_keys=True) + "\n")
    numbers = sum(math.prod(entry.shape) for entry in entries)
    return f"{target}: adapters of {step_dir}, {len(entries)} arrays, {numbers:,} numbers"


def _config(config: Mapping[str, Any], names: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config["warm_start"]["source"] or None,
        "r": config["lora"]["rank"],
        "lora_alpha": config["lora"]["alpha"],
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }


if __name__ == "__main__":
    sys.exit(main())
