"""A bird encoder with its front end and its head as one ONNX file.

Samples of waveforms go in, and features and scores come out.

The graph is written node by node, of operators that every runtime has: the short-time Fourier
transform is a product with a matrix, for neither of the exporters that trace a program (of JAX, of
torch) translates one. Everything is float32.

Shapes: B waveforms, N samples, F frames of them, W mels, T tokens, D embed, H heads, K head
dimension, C classes.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.arrays import run_workload
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.types import Format
from jaxtrain.workloads.bird import log_mel, vit
from jaxtrain.workloads.bird.export import saved
from jaxtrain.workloads.bird.model import Config
from loaders.audio import front_end
from loaders.audio.front_end import FrontEnd

# the first opset with GELU; both are read by onnxruntime 1.17 (2024) and later
OPSET, IR_VERSION = 20, 9
MODEL, DATA = "model.onnx", "model.onnx.data"
# [bytes] of the arrays inside of the file, whose format ends at 2^31; more lie next to it
LARGEST = 1_900_000_000
PAGE = 65_536  # [bytes] of which multiples are mapped into memory
MAX_TOKENS = 1 << 16  # attention compares each with each
# of the matrix of a frame's transform. Windows of 25 ms have fewer up to 384 kHz
MAX_VALUES = 1 << 28
COMMAND = "python example_onnx.py bird.wav"
EXAMPLE = '''"""Classes in a recording, window by window: python example_onnx.py bird.wav"""
import json, pathlib, sys
if len(sys.argv) != 2:
    print(f"usage: python {sys.argv[0]} RECORDING", file=sys.stderr); sys.exit(2)
import numpy, onnxruntime, soundfile
session = onnxruntime.InferenceSession(str(pathlib.Path(__file__).with_name("model.onnx")))
about = session.get_modelmeta().custom_metadata_map
rate, samples, classes = int(about["sample_rate"]), int(about["samples"]), json.loads(about["classes"])
wave, own = soundfile.read(sys.argv[1], dtype="float32", always_2d=True)
if round(own * float(about["time_expansion"])) != rate:
    wanted = round(rate / float(about["time_expansion"]))
    sys.exit(f"{sys.argv[1]} has {own} Hz, and the model hears {wanted}: ffmpeg -i {sys.argv[1]} -ar {wanted} resampled.wav")
wave = wave.mean(1)
windows = numpy.pad(wave, (0, -len(wave) % samples)).reshape(-1, samples)
for i, window in enumerate(windows):
    found = dict(zip([each.name for each in session.get_outputs()], session.run(None, {"waveform": window[None]})))
    print(f"{i * samples / rate:g} s", end="")
    if "scores" in found:
        best = numpy.argsort(-found["scores"][0])[:3]
        print(*(f"\\t{classes[k] if classes else k} {found['scores'][0, k]:.3f}" for k in best), sep="")
    else:
        print("\\t", *found["features"][0])
'''


class Graph:
    """Nodes and arrays of a model. A call adds a node and returns its (first) output."""

    def __init__(self, onnx: Any):
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []
        self._onnx = onnx

    def array(self, x: np.ndarray, name: str = "") -> str:
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("<"))
        self.arrays.append(
            self._onnx.numpy_helper.from_array(x, name := name or f"array_{len(self.arrays)}")
        )
        return name

    def __call__(
        self, operator: str, *inputs: str | np.ndarray | Sequence[int] | float, **attributes: Any
    ) -> str:
        names = []
        for each in inputs:
            if not isinstance(each, str):
                each = self.array(np.asarray(each, np.float32 if isinstance(each, float) else None))
            names.append(each)
        n, own = attributes.get("num_outputs", 1), attributes.pop("output", "")
        outputs: list[str] = (
            [own] if own else [f"{operator}_{len(self.nodes)}_{i}" for i in range(n)]
        )
        self.nodes.append(
            self._onnx.helper.make_node(operator, names, outputs, name=outputs[0], **attributes)
        )
        return outputs[0]

    def split(self, x: str, n: int, axis: int) -> list[str]:
        self("Split", x, axis=axis, num_outputs=n)
        return list(self.nodes[-1].output)

    def slice(self, x: str, start: int, stop: int, axis: int) -> str:
        return self("Slice", x, [start], [stop], [axis])


def files(
    c: Config, data: Mapping[str, Any], arrays: Mapping[str, Stored], about: Mapping[str, str]
) -> dict[str, bytes]:
    """model.onnx, further data if it would be too large, and example_onnx.py: name -> content.

    ``c``, ``data``: sections of the run's config. ``arrays``: its parameters, without a head's for
    no scores. ``about``: further metadata. Raises StoredError: parameters are missing, or the front
    end does not fit the model.
    """
    import onnx
    from onnx import helper

    of, samples = _front_end(c, data)
    if wrong := saved.misfits(c, arrays):
        raise StoredError(f"--onnx writes a whole encoder: {'; '.join(wrong)}")
    params = saved.encoder(c, arrays)
    graph = Graph(onnx)
    cls, patches = _encode(graph, c, params, _spectrogram(graph, of, c.n_frames, samples))
    tokens, normed = cls if c.pool == "cls" else patches, c.norm == "pooled"
    features = graph("ReduceMean", tokens, [1], keepdims=0, output="" if normed else "features")
    if normed:
        features = graph(
            "LayerNormalization",
            features,
            params["scale"],
            params["bias"],
            epsilon=c.eps,
            output="features",
        )
    number = onnx.TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info("features", number, ["batch", c.embed])]
    metadata = {
        "sample_rate": str(of.sample_rate),
        "samples": str(samples),
        "time_expansion": repr(float(data.get("time_expansion", 1))),
        "front_end": json.dumps(of.settings),
        "features": f"the mean of {'CLS' if c.pool == 'cls' else 'the patches'}",
        "classes": json.dumps(None),
    }
    # that of its labels, else its probe
    for kind, weights in list(saved.heads(c, arrays).items())[:1]:
        softmax = (
            c.section("supervised").loss == "softmax" if kind == "linear" else not c.multilabel
        )
        _scores(graph, kind, weights, features, softmax)
        n = weights["b"].shape[0]
        outputs.append(helper.make_tensor_value_info("scores", number, ["batch", n]))
        names = list(c.class_names or ())
        metadata |= {
            "classes": json.dumps(names if len(names) == n else None),
            "scores": "softmax" if softmax else "sigmoid",
        }
    made = helper.make_graph(
        graph.nodes,
        "bird",
        [helper.make_tensor_value_info("waveform", number, ["batch", samples])],
        outputs,
        graph.arrays,
        doc_string=(
            f"waveform: {samples} samples of {of.sample_rate} Hz, mono, in -1 … 1, zeros if it is"
            " shorter"
        ),
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(
        made, producer_name="jaxtrain", ir_version=IR_VERSION, opset_imports=opsets
    )
    helper.set_model_props(model, {**about, **metadata})
    outside = (
        _outside(onnx, model)
        if sum(len(x.raw_data) for x in model.graph.initializer) > LARGEST
        else {}
    )
    return {
        MODEL: model.SerializeToString(deterministic=True),
        **outside,
        "example_onnx.py": EXAMPLE.encode(),
    }


def _front_end(c: Config, data: Mapping[str, Any]) -> tuple[FrontEnd, int]:
    """Return the front end of the run, and the samples of a clip. Raises StoredError."""
    try:
        of = front_end.of_run(
            {"data": data, "model": {"front_end": c.front_end and dataclasses.asdict(c.front_end)}}
        )
    except ValueError as error:
        raise StoredError(f"the run's config's {error}") from error
    seconds, slower = data.get("clip_seconds", 5.0), data.get("time_expansion", 1.0)
    for name, value in (("clip_seconds", seconds), ("time_expansion", slower)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise StoredError(
                f"the run's config.data.{name} is {str(value)[:40]!r}; expected a positive number"
            )
    samples = round(seconds * of.sample_rate)
    frames = of.n_clip_frames(samples)
    if not 1 <= frames <= c.n_frames or of.n_mels != c.n_mels:
        raise StoredError(
            f"the run's config.data makes {frames} frames of {of.n_mels} mels, and its model reads"
            f" {c.n_frames} of {c.n_mels}"
        )
    if (tokens := c.n_tokens) > MAX_TOKENS:
        raise StoredError(
            f"the run's model has {tokens:,} tokens; --onnx writes models of up to {MAX_TOKENS:,}"
        )
    if of.window << (of.window - 1).bit_length() > MAX_VALUES:
        raise StoredError(
            f"the run's front end has windows of {of.window} samples, whose transform would be a"
            f" matrix of more than {MAX_VALUES * 4 // 10**6} MB in the file; omit --onnx"
        )
    return of, samples


def _spectrogram(graph: Graph, of: FrontEnd, n_frames: int, samples: int) -> str:
    """`log_mel.spectrogram` of "waveform" [B, N]: the name of [B, n_frames, W]."""
    frames = of.n_clip_frames(samples)
    window_n, bands_kw = log_mel.tables(of)
    heard = bands_kw.any(1)  # no other bin is in a band
    n_fft = 2 * len(bands_kw)
    places = np.arange(of.window)[:, None] * np.flatnonzero(heard)[None] % n_fft
    circle = 2 * np.pi * np.arange(n_fft) / n_fft
    matrix = np.concatenate([np.cos(circle)[places], np.sin(circle)[places]], 1) * window_n[:, None]

    starts, offsets = np.arange(frames)[:, None] * of.hop, np.arange(of.window)[None]
    x_bfn = graph("Gather", "waveform", graph("Add", starts, offsets), axis=1)
    x_bfn = graph("Sub", x_bfn, graph("ReduceMean", x_bfn, [-1], keepdims=1))
    # The window's first value is 0, so that the first sample needs none before it.
    before = graph("Mul", graph.slice(x_bfn, 0, of.window - 1, 2), log_mel.EMPHASIS)
    y_bfn = graph("Sub", graph.slice(x_bfn, 1, of.window, 2), before)
    parts = graph.split(graph("MatMul", y_bfn, matrix[1:].astype(np.float32)), 2, axis=2)
    power = graph("Add", *(graph("Mul", part, part) for part in parts))
    energy = graph("MatMul", power, bands_kw[heard])
    x_bfw = graph("Log", graph("Max", energy, log_mel.FLOOR))
    if frames < n_frames:
        least = graph("ReduceMin", x_bfw, [1, 2], keepdims=1)
        rest = graph("Add", least, np.zeros((1, n_frames - frames, of.n_mels), np.float32))
        x_bfw = graph("Concat", x_bfw, rest, axis=1)
    return graph("Div", graph("Sub", x_bfw, float(of.mean)), float(of.scale))


def _encode(graph: Graph, c: Config, params: Any, x_bfw: str) -> tuple[str, str]:
    """`vit.encode`: the names of CLS [B, 1, D] and of the patches."""
    (f, w), (rows, columns) = c.patch, c.grid
    x = graph("Reshape", x_bfw, [0, rows, f, columns, w])
    x_bnp = graph(
        "Reshape", graph("Transpose", x, perm=[0, 1, 3, 2, 4]), [0, c.n_patches, c.patch_size]
    )
    x_bnd = graph("MatMul", x_bnp, params["w_patch"])
    # Places for the other tokens, and then every token's constant at once.
    registers = params["embed_registers"] if c.n_registers else np.zeros((0, c.embed), np.float32)
    x_btd = graph("Pad", x_bnd, [0, 1, 0, 0, c.n_registers, 0])
    constant = np.broadcast_to(params["b_patch"] + params.get("pos", 0), (c.n_patches, c.embed))
    x_btd = graph("Add", x_btd, np.concatenate([params["cls"], constant, registers]))
    turns = (
        [np.asarray(each)[0].transpose(1, 0, 2) for each in vit.axial_rope(c, None)]
        if c.positions == "rope"
        else None
    )
    turns = turns and [graph.array(each) for each in turns]
    for i in range(c.depth):
        weights = {name: each[i] for name, each in params["blocks"].items()}
        x_btd = _layer(graph, c, weights, x_btd, turns, f"encoder/blocks/{i}")
    if c.norm == "tokens":
        x_btd = graph("LayerNormalization", x_btd, params["scale"], params["bias"], epsilon=c.eps)
    return graph.slice(x_btd, 0, 1, 1), graph.slice(x_btd, 1, 1 + c.n_patches, 1)


def _layer(
    graph: Graph,
    c: Config,
    w: Mapping[str, np.ndarray],
    x_btd: str,
    turns: list[str] | None,
    name: str,
) -> str:
    """Return a layer of `vit.run_stack`, by its weights ``w``."""
    d, h = c.embed, c.heads
    k = d // h

    def norm(x: str, which: str) -> str:
        return graph(
            "LayerNormalization", x, w[f"scale_{which}"], w[f"bias_{which}"], epsilon=c.eps
        )

    def product(x: str, matrix: str, shape: tuple[int, int]) -> str:
        return graph("MatMul", x, graph.array(w[matrix].reshape(shape), f"{name}/{matrix}"))

    def added(x: str, y: str, which: str) -> str:
        return graph("Add", x, graph("Mul", y, w[f"scale_added_{which}"]) if c.layer_scale else y)

    qkv = graph(
        "Add", product(norm(x_btd, "attention"), "w_qkv", (d, 3 * d)), w["b_qkv"].reshape(-1)
    )
    qkv = graph("Transpose", graph("Reshape", qkv, [0, 0, 3, h, k]), perm=[2, 0, 3, 1, 4])
    q, k_bhtk, v = (graph("Squeeze", part, [0]) for part in graph.split(qkv, 3, axis=0))
    if c.qk_norm:
        q, k_bhtk = norm(q, "q"), norm(k_bhtk, "k")
    if turns:
        q, k_bhtk = (_turned(graph, z, turns, k) for z in (q, k_bhtk))
    scores = graph(
        "MatMul", graph("Mul", q, 1 / math.sqrt(k)), graph("Transpose", k_bhtk, perm=[0, 1, 3, 2])
    )
    y = graph("Transpose", graph("MatMul", graph("Softmax", scores), v), perm=[0, 2, 1, 3])
    y = graph("Add", product(graph("Reshape", y, [0, 0, d]), "w_out", (d, d)), w["b_out"])
    x_btd = added(x_btd, y, "attention")

    m = c.stack.hidden
    z = norm(x_btd, "mlp")
    if c.stack.gated:
        gate = product(z, "w_gate", (d, m))
        y = graph("Mul", graph("Mul", gate, graph("Sigmoid", gate)), product(z, "w_up", (d, m)))
        return added(x_btd, product(y, "w_down", (m, d)), "mlp")
    y = graph("Add", product(z, "w_up", (d, m)), w["b_up"])
    y = graph("Gelu", y, approximate="none" if c.stack.exact else "tanh")
    return added(x_btd, graph("Add", product(y, "w_down", (m, d)), w["b_down"]), "mlp")


def _turned(graph: Graph, x_bhtk: str, turns: list[str], k: int) -> str:
    """`layers.rotate` by cos and sin [1, T, K / 2]."""
    a, b = graph.slice(x_bhtk, 0, k // 2, 3), graph.slice(x_bhtk, k // 2, k, 3)
    cos, sin = turns
    first = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
    return graph("Concat", first, graph("Add", graph("Mul", b, cos), graph("Mul", a, sin)), axis=3)


def _scores(
    graph: Graph, kind: str, head: Mapping[str, np.ndarray], features: str, softmax: bool
) -> None:
    """Add the output "scores" [B, C]."""
    x = features
    if kind == "probe":
        x = graph("LayerNormalization", x, head["scale"], head["bias"], epsilon=vit.EPS)
    z = graph("Add", graph("MatMul", x, head["w"]), head["b"])
    # a softmax is along the last axis
    graph("Softmax" if softmax else "Sigmoid", z, output="scores")


def _outside(onnx: Any, model: Any) -> dict[str, bytes]:
    """Move the arrays of a model into a file next to it: its name -> content."""
    content = bytearray()
    for x in model.graph.initializer:
        if len(x.raw_data) < PAGE:
            continue
        content += bytes(-len(content) % PAGE)
        onnx.external_data_helper.set_external_data(
            x, DATA, offset=len(content), length=len(x.raw_data)
        )
        content += x.raw_data
        x.ClearField("raw_data")
        x.data_location = onnx.TensorProto.EXTERNAL
    return {DATA: bytes(content)}


def _of_run(
    config: Mapping[str, Any], arrays: Mapping[str, Stored], about: Mapping[str, str]
) -> dict[str, bytes]:
    return files(
        run_workload.section_of(config, "model", Config), config.get("data") or {}, arrays, about
    )


FORMAT = Format(files=_of_run, example=COMMAND)
