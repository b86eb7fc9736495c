"""The decoder under Hugging Face's names and shapes, with numbers in the same order."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import specs
from jaxtrain import workload as workload_lib
from jaxtrain.nn.transformer import Decoder
from jaxtrain.types import EXPORT_FILE
from loaders.io import checks, files

LAYER = {
    "scale_attention": "input_layernorm.weight",
    "w_q": "self_attn.q_proj.weight",
    "w_k": "self_attn.k_proj.weight",
    "w_v": "self_attn.v_proj.weight",
    "b_q": "self_attn.q_proj.bias",
    "b_k": "self_attn.k_proj.bias",
    "b_v": "self_attn.v_proj.bias",
    "scale_q": "self_attn.q_norm.weight",
    "scale_k": "self_attn.k_norm.weight",
    "w_out": "self_attn.o_proj.weight",
    "scale_mlp": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}

# Fields of `Decoder`, and of its `Rope` if that is stretched: ours -> those of config.json.
SIZES = {
    "embed": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "eps": "rms_norm_eps",
}
ROPE = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original": "original_max_position_embeddings",
}


# Fields that `Decoder` lacks: field -> values, besides null, that do not change the function.
_OFF = (
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
    "qk_layernorm",
    "use_parallel_residual",
    "parallel_attn",
    "alibi",
)
_FACTORS = (
    "partial_rotary_factor",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
)
_ABSENT = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "attention_multiplier",
    "clip_qkv",
)
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_FACTORS, (1,)),
    **dict.fromkeys(_ABSENT, ()),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "is_causal": (True,),
    "no_rope_layers": ([],),
}


# Names of files with the terms of weights, which go where the weights go.
TERMS = re.compile(r"(licen[cs]e|notice|use_policy|copying)\b[\w .-]*", re.IGNORECASE)


class HuggingFaceError(ValueError):
    """A config.json of a model that `Decoder` cannot be."""


class Names(NamedTuple):
    """The names of a decoder's parameters in another system's weights."""

    top: Mapping[str, str]  # path of a parameter outside the stack -> name
    layer: Mapping[str, str]  # path below "blocks/" -> name within a layer
    prefix: str = "layers"  # before a layer's number

    def of(self, path: str, depth: int) -> str | list[str]:
        """Return the name of a parameter, or one name for each layer of the stack."""
        if path in self.top:
            return self.top[path]
        name = self.layer[path.removeprefix("blocks/")]
        return [f"{self.prefix}.{i}.{name}" for i in range(depth)]

    def renames(self, table: Any) -> tuple[tuple[str, str], ...]:
        """Return config.warm_start.renames, from these names to the paths of a table."""
        renames = []
        for path in specs.paths(table):
            name = path.removeprefix("blocks/")
            if name == path:
                renames.append((f"^{_slashes(self.top[path])}$", path))
            else:
                layer_name = _slashes(self.layer[name])
                pattern = rf"^{_slashes(self.prefix)}/(\d+)/{layer_name}$"
                renames.append((pattern, rf"{path}[\1]"))
        return tuple(renames)


def _slashes(name: str) -> str:
    return name.replace(".", "/")


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Turn any error of a broken config.json into a HuggingFaceError with its path."""
    try:
        yield
    except (HuggingFaceError, files.FileError) as error:
        raise HuggingFaceError(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise HuggingFaceError(f"{path}: {error!r}") from error


def own_export(
    folder: str | pathlib.Path, workload: str, names: Sequence[str]
) -> dict[str, Any] | None:
    """Read the fields of the section ``model`` from a folder of `jaxtrain export`, else None.

    Args:
      workload: the module whose run it has to be.
      names: fields of the workload's ``Config`` that decide shapes, besides those of `Decoder`.

    Raises HuggingFaceError for an export of another workload, and for a damaged one.
    """
    path = files.expanded(folder) / EXPORT_FILE
    if not path.is_file():
        return None
    try:
        config = files.read_json(files.inside(path.parent, path.name))["config"]
        run_workload, model = config["workload"], dict(config["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HuggingFaceError(
            f"{path} cannot be read as an export of jaxtrain: {error!r}"
        ) from error
    if not workload_lib.is_kind(run_workload, workload):
        raise HuggingFaceError(
            f"{path}: the export is of a run of {run_workload}; expected one of {workload}"
        )
    # The data decide the number of places, unless they are learned.
    names_read = {*names, *(field.name for field in dataclasses.fields(Decoder))}
    if model.get("positions") != "learned" and "context" not in names:
        names_read.discard("context")
    return {name: value for name, value in model.items() if name in names_read}


def read_files(folder: pathlib.Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read the existing files of a folder, by name. Raises FileError."""
    contents = {}
    for name in names:
        if (folder / name).is_file():
            contents[name] = files.read(files.inside(folder, name), most=files.MAX_JSON)
    return contents


def terms_files(folder: pathlib.Path) -> dict[str, bytes]:
    """Read licence and notices next to config.json, by name. Raises FileError."""
    if not (folder / "config.json").is_file():
        return {}
    names = sorted(path.name for path in folder.iterdir() if TERMS.fullmatch(path.name))
    return read_files(folder, names)


def tokenizer_files(
    named: Sequence[str | None],
    base: pathlib.Path | None,
    vocab: int | None,
    read: Callable[[pathlib.Path], dict[str, bytes]],
) -> tuple[dict[str, bytes], bool]:
    """Read a run's tokenizer files, and whether its base's token ids mean the same tokens.

    They are those of the first tokenizer that is named, else of the base weights. Its companions
    may lie at either.

    Args:
      named: what the run knows of its tokenizer: a tokenizer.json, or "bytes" if texts were bytes
      or characters.
      vocab: the run's. Base weights with another one have another tokenizer.
      read: a reader of a tokenizer's files, given a folder or a tokenizer.json of any name.
    """
    run_tokenizer = next(filter(None, named), None)
    base_files = read(base) if base and base.is_dir() else {}
    if run_tokenizer is None:
        has_base_vocab = vocab in (None, _vocab_of(base, vocab))
        return (base_files, True) if has_base_vocab else ({}, False)
    if run_tokenizer == "bytes":
        return {}, False
    run_files = read(files.expanded(run_tokenizer))
    if "tokenizer.json" not in run_files:
        print(
            f"warning: the run's tokenizer, {run_tokenizer}, is gone, and the export has none",
            file=sys.stderr,
        )
        return {}, not base_files
    base_tokenizer = base_files.get("tokenizer.json", run_files["tokenizer.json"])
    if base_tokenizer == run_files["tokenizer.json"]:
        return base_files | run_files, True
    return run_files, False


def _vocab_of(base: pathlib.Path | None, default: int | None) -> Any:
    """Read the vocabulary's size from the base weights' config.json. Raises FileError."""
    if not base or not (base / "config.json").is_file():
        return default
    fields = files.read_json(files.inside(base, "config.json"))
    return (fields.get("text_config") or fields).get("vocab_size", default)


def without_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json or generation_config.json without those that name tokens by id."""
    of_ids = re.compile(r"(token|eos|bos|pad)_ids?$|^suppress_tokens$")
    return {name: value for name, value in fields.items() if not of_ids.search(name)}


def folded(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one layer's array at Hugging Face, heads and head_dim as one axis."""
    if name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v"):
        return (shape[0] * shape[1], *shape[2:])
    if name == "w_out":
        return (shape[0], shape[1] * shape[2])
    return shape


def decoder_fields(
    h: Mapping[str, Any], path: pathlib.Path, problems: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the fields of `transformer.Decoder` from a config.json of Llama's kind.

    The spelling may be that of transformers 4 or 5. Raises HuggingFaceError, also with the caller's
    ``problems``, for every field that changes the function in a way that `Decoder` lacks.
    """
    rope = h.get("rope_scaling") or h.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise HuggingFaceError(
            f"{path}: rope_scaling or rope_parameters is {str(rope)[:80]!r}; expected an object"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", h.get("rope_theta", 1e4))
    problems = [
        *problems,
        *_rope_problems(h, rope, kind),
        *_number_problems(h, rope if kind == "llama3" else {}, theta),
    ]
    for name, plain in PLAIN.items():
        if h.get(name) not in (None, *plain):
            expected = " or ".join(map(json.dumps, plain or (None,)))
            problems.append(f"{name} is {repr(h[name])[:80]}; expected {expected}")
    if unknown_types := sorted(set(h.get("layer_types") or ()) - {"full_attention"}):
        types = ", ".join(map(str, unknown_types))[:80]
        problems.append(f"layer_types has {types}; expected full_attention alone")
    if problems:
        raise HuggingFaceError(f"{path}: {'; '.join(problems)}")
    heads = h["num_attention_heads"]
    rope_fields = {"theta": float(theta)}
    if kind == "llama3":
        rope_fields |= {ours: float(rope[theirs]) for ours, theirs in ROPE.items()}
        rope_fields["original"] = rope[ROPE["original"]]  # a whole number
    return dict(
        {ours: h[theirs] for ours, theirs in SIZES.items()},
        kv_heads=h.get("num_key_value_heads") or heads,
        head_dim=h.get("head_dim") or h["hidden_size"] // heads,
        rope=rope_fields,
    )


# Fields that may have a fraction. Other numbers of a config.json are whole.
_FRACTIONS = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")


def _number_problems(h: Mapping[str, Any], scaling: Mapping[str, Any], theta: Any) -> Iterator[str]:
    """Name the fields that are no numbers above 0: sizes, its ``scaling``'s, rope's theta."""
    numbers = {name: h.get(name) for name in (*SIZES.values(), "vocab_size")}
    numbers |= {name: h[name] for name in ("num_key_value_heads", "head_dim") if h.get(name)}
    if scaling:
        numbers |= {name: scaling.get(name) for name in ROPE.values()}
    for name, value in {**numbers, "rope_theta": theta}.items():
        is_number = type(value) is int or (type(value) is float and name in _FRACTIONS)
        if not is_number or not 0 < value < math.inf:
            kind = "number" if name in _FRACTIONS else "whole number"
            yield f"{name} is {json.dumps(value)[:80]}; expected a {kind} above 0"


def _rope_problems(h: Mapping[str, Any], rope: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """Name rotary fields that `layers.Rope` lacks, or that transformers 4 and 5 read unlike."""
    if kind not in ("default", "llama3"):
        yield f"rope_type is {kind!r}; {checks.expected(kind, ('default', 'llama3'))}"
    if any(isinstance(value, Mapping) for value in rope.values()):
        yield "rope_parameters differ between kinds of layers; expected one for all"
    elif not {"rope_type", "type"} & rope.keys():
        names = sorted(rope.keys() - {"rope_theta", "partial_rotary_factor"})
        if names:
            text = ", ".join(names)[:80]
            yield f"rope_scaling or rope_parameters has {text}, and no rope_type; set it"
    scaling, parameters = h.get("rope_scaling"), h.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        yield "rope_scaling and rope_parameters differ; remove one of them"
    if h.get("rope_theta") not in (None, rope.get("rope_theta", h.get("rope_theta"))):
        yield (
            f"rope_theta is {h['rope_theta']}, and {rope['rope_theta']} in rope_parameters; remove"
            " one of them"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']}; expected 1"
