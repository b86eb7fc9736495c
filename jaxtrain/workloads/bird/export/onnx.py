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
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.arrays import run_workload
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.types import Format
from jaxtrain.workloads.bird import log_mel, vit
from jaxtrain.workloads.bird.export import saved
from jaxtrain.workloads.bird.model import Config
from loaders.audio import front_end
from loaders.audio.front_end import FrontEnd

OPSET = 20  # the first with GELU; onnxruntime 1.17 (2024) and later read it and its IR version
IR_VERSION = 9
MODEL = "model.onnx"
DATA = "model.onnx.data"
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
outputs = [output.name for output in session.get_outputs()]
about = session.get_modelmeta().custom_metadata_map
rate, samples = int(about["sample_rate"]), int(about["samples"])
classes = json.loads(about["classes"])
wave, own = soundfile.read(sys.argv[1], dtype="float32", always_2d=True)
if round(own * float(about["time_expansion"])) != rate:
    wanted = round(rate / float(about["time_expansion"]))
    sys.exit(f"{sys.argv[1]} has {own} Hz, and the model hears {wanted}:"
             f" ffmpeg -i {sys.argv[1]} -ar {wanted} resampled.wav")
wave = wave.mean(1)
windows = numpy.pad(wave, (0, -len(wave) % samples)).reshape(-1, samples)
for i, window in enumerate(windows):
    found = dict(zip(outputs, session.run(None, {"waveform": window[None]})))
    print(f"{i * samples / rate:g} s", end="")
    if "scores" in found:
        scores = found["scores"][0]
        best = numpy.argsort(-scores)[:3]
        print(*(f"\\t{classes[k] if classes else k} {scores[k]:.3f}" for k in best), sep="")
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
        name = name or f"array_{len(self.arrays)}"
        self.arrays.append(self._onnx.numpy_helper.from_array(x, name))
        return name

    def __call__(
        self, operator: str, *inputs: str | np.ndarray | Sequence[int] | float, **attributes: Any
    ) -> str:
        names = [self._name_of(x) for x in inputs]
        n_outputs = attributes.get("num_outputs", 1)
        output = attributes.pop("output", "")
        stem = f"{operator}_{len(self.nodes)}"
        outputs: list[str] = [f"{stem}_{i}" for i in range(n_outputs)]
        if output:
            outputs = [output]
        node = self._onnx.helper.make_node(operator, names, outputs, name=outputs[0], **attributes)
        self.nodes.append(node)
        return outputs[0]

    def _name_of(self, x: str | np.ndarray | Sequence[int] | float) -> str:
        """Return the name of an input, which is added as an array if it has none."""
        if isinstance(x, str):
            return x
        return self.array(np.asarray(x, np.float32 if isinstance(x, float) else None))

    def split(self, x: str, n: int, axis: int) -> list[str]:
        self("Split", x, axis=axis, num_outputs=n)
        return list(self.nodes[-1].output)

    def slice(self, x: str, start: int, stop: int, axis: int) -> str:
        return self("Slice", x, [start], [stop], [axis])


class Head(NamedTuple):
    """The head whose scores a file has."""

    kind: str  # of `saved.HEADS`
    weights: Mapping[str, np.ndarray]
    softmax: bool  # over the classes; False = a sigmoid of each

    @property
    def n_classes(self) -> int:
        return int(self.weights["b"].shape[0])


def files(
    c: Config, data: Mapping[str, Any], arrays: Mapping[str, Stored], about: Mapping[str, str]
) -> dict[str, bytes]:
    """model.onnx, further data if it would be too large, and example_onnx.py: name -> content.

    ``c``, ``data``: sections of the run's config. ``arrays``: its parameters, without a head's for
    no scores. ``about``: further metadata. Raises StoredError: parameters are missing, or the front
    end does not fit the model.
    """
    import onnx

    of, samples = _front_end(c, data)
    if misfits := saved.misfits(c, arrays):
        raise StoredError(f"--onnx writes a whole encoder: {'; '.join(misfits)}")
    graph = Graph(onnx)
    params = saved.encoder(c, arrays)
    spectrogram = _spectrogram(graph, of, c.n_frames, samples)
    features = _features(graph, c, params, spectrogram)
    head = _head(c, arrays)
    if head:
        _scores(graph, head, features)
    model = _model(onnx, graph, c, of, samples, head)
    metadata = _metadata(c, data, of, samples, head)
    onnx.helper.set_model_props(model, {**about, **metadata})
    n_bytes = sum(len(array.raw_data) for array in model.graph.initializer)
    outside = _outside(onnx, model) if n_bytes > LARGEST else {}
    return {
        MODEL: model.SerializeToString(deterministic=True),
        **outside,
        "example_onnx.py": EXAMPLE.encode(),
    }


def _head(c: Config, arrays: Mapping[str, Stored]) -> Head | None:
    """Return the run's supervised head, or else its probe."""
    heads = saved.heads(c, arrays)
    if "linear" in heads:
        return Head("linear", heads["linear"], c.section("supervised").loss == "softmax")
    if "probe" in heads:
        return Head("probe", heads["probe"], not c.multilabel)
    return None


def _model(
    onnx: Any, graph: Graph, c: Config, of: FrontEnd, samples: int, head: Head | None
) -> Any:
    helper = onnx.helper
    number = onnx.TensorProto.FLOAT
    waveform = helper.make_tensor_value_info("waveform", number, ["batch", samples])
    outputs = [helper.make_tensor_value_info("features", number, ["batch", c.embed])]
    if head:
        outputs.append(helper.make_tensor_value_info("scores", number, ["batch", head.n_classes]))
    doc_string = (
        f"waveform: {samples} samples of {of.sample_rate} Hz, mono, in -1 … 1, zeros if it is"
        " shorter"
    )
    onnx_graph = helper.make_graph(
        graph.nodes, "bird", [waveform], outputs, graph.arrays, doc_string=doc_string
    )
    return helper.make_model(
        onnx_graph,
        producer_name="jaxtrain",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )


def _metadata(
    c: Config, data: Mapping[str, Any], of: FrontEnd, samples: int, head: Head | None
) -> dict[str, str]:
    metadata = {
        "sample_rate": str(of.sample_rate),
        "samples": str(samples),
        "time_expansion": repr(float(data.get("time_expansion", 1))),
        "front_end": json.dumps(of.settings),
        "features": f"the mean of {'CLS' if c.pool == 'cls' else 'the patches'}",
        "classes": json.dumps(None),
    }
    if head:
        names = list(c.class_names or ())
        if len(names) == head.n_classes:
            metadata["classes"] = json.dumps(names)
        metadata["scores"] = "softmax" if head.softmax else "sigmoid"
    return metadata


def _front_end(c: Config, data: Mapping[str, Any]) -> tuple[FrontEnd, int]:
    """Return the front end of the run, and the samples of a clip. Raises StoredError."""
    model = {"front_end": c.front_end and dataclasses.asdict(c.front_end)}
    try:
        of = front_end.of_run({"data": data, "model": model})
    except ValueError as error:
        raise StoredError(f"the run's config's {error}") from error
    seconds = data.get("clip_seconds", 5.0)
    expansion = data.get("time_expansion", 1.0)
    for name, value in (("clip_seconds", seconds), ("time_expansion", expansion)):
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
    if c.n_tokens > MAX_TOKENS:
        raise StoredError(
            f"the run's model has {c.n_tokens:,} tokens; --onnx writes models of up to"
            f" {MAX_TOKENS:,}"
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
    is_in_band_k = bands_kw.any(1)
    n_fft = 2 * len(bands_kw)
    bin_k = np.flatnonzero(is_in_band_k)
    place_nk = np.arange(of.window)[:, None] * bin_k[None] % n_fft
    angle = 2 * np.pi * np.arange(n_fft) / n_fft
    transform = np.concatenate([np.cos(angle)[place_nk], np.sin(angle)[place_nk]], 1)
    transform = transform * window_n[:, None]

    start_f1 = np.arange(frames)[:, None] * of.hop
    offset_1n = np.arange(of.window)[None]
    x_bfn = graph("Gather", "waveform", graph("Add", start_f1, offset_1n), axis=1)
    x_bfn = graph("Sub", x_bfn, graph("ReduceMean", x_bfn, [-1], keepdims=1))
    # The window's first value is 0, so that the first sample needs none before it.
    previous = graph.slice(x_bfn, 0, of.window - 1, 2)
    previous = graph("Mul", previous, log_mel.EMPHASIS)
    y_bfn = graph("Sub", graph.slice(x_bfn, 1, of.window, 2), previous)
    product = graph("MatMul", y_bfn, transform[1:].astype(np.float32))
    real, imaginary = graph.split(product, 2, axis=2)
    power = graph("Add", graph("Mul", real, real), graph("Mul", imaginary, imaginary))
    energy = graph("MatMul", power, bands_kw[is_in_band_k])
    x_bfw = graph("Log", graph("Max", energy, log_mel.FLOOR))
    if frames < n_frames:
        least = graph("ReduceMin", x_bfw, [1, 2], keepdims=1)
        zeros = np.zeros((1, n_frames - frames, of.n_mels), np.float32)
        x_bfw = graph("Concat", x_bfw, graph("Add", least, zeros), axis=1)
    return graph("Div", graph("Sub", x_bfw, float(of.mean)), float(of.scale))


def _features(graph: Graph, c: Config, params: Any, x_bfw: str) -> str:
    """Add the output "features" [B, D]: `vit.pooled` of `vit.encode`."""
    cls, patches = _encode(graph, c, params, x_bfw)
    tokens = cls if c.pool == "cls" else patches
    if c.norm == "tokens":
        return graph("ReduceMean", tokens, [1], keepdims=0, output="features")
    mean = graph("ReduceMean", tokens, [1], keepdims=0)
    scale, bias = params["scale"], params["bias"]
    return graph("LayerNormalization", mean, scale, bias, epsilon=c.eps, output="features")


def _level(graph: Graph, w_ld: np.ndarray, x_bnp: str) -> str:
    """`vit.normalised`: the part [B, N, D] of tokens that the level of patches decides."""
    mean_bn1 = graph("ReduceMean", x_bnp, [-1], keepdims=1)
    centred_bnp = graph("Sub", x_bnp, mean_bn1)
    square_bnp = graph("Mul", centred_bnp, centred_bnp)
    variance_bn1 = graph("Add", graph("ReduceMean", square_bnp, [-1], keepdims=1), vit.PATCH_EPS)
    log_bn1 = graph("Mul", graph("Log", variance_bn1), 0.5)
    return graph("MatMul", graph("Concat", mean_bn1, log_bn1, axis=2), w_ld)


def _encode(graph: Graph, c: Config, params: Any, x_bfw: str) -> tuple[str, str]:
    """`vit.encode`: the names of CLS [B, 1 or 0, D] and of the patches."""
    f, w = c.patch
    rows, columns = c.grid
    x = graph("Reshape", x_bfw, [0, rows, f, columns, w])
    x = graph("Transpose", x, perm=[0, 1, 3, 2, 4])
    x_bnp = graph("Reshape", x, [0, c.n_patches, c.patch_size])
    if c.patch_norm:
        level_bnd = _level(graph, params["w_patch_level"], x_bnp)
        scale, bias = np.ones(c.patch_size, np.float32), np.zeros(c.patch_size, np.float32)
        x_bnp = graph("LayerNormalization", x_bnp, scale, bias, epsilon=vit.PATCH_EPS)
    x_bnd = graph("MatMul", x_bnp, params["w_patch"])
    if c.patch_norm:
        x_bnd = graph("Add", x_bnd, level_bnd)
    # Places for the other tokens, and then every token's constant at once.
    x_btd = graph("Pad", x_bnd, [0, c.n_cls, 0, 0, c.n_registers, 0])
    constant_nd = params["b_patch"] + params.get("pos", 0)
    constant_nd = np.broadcast_to(constant_nd, (c.n_patches, c.embed))
    none = np.zeros((0, c.embed), np.float32)
    cls = params.get("cls", none)
    registers = params.get("embed_registers", none)
    x_btd = graph("Add", x_btd, np.concatenate([cls, constant_nd, registers]))
    turns = None
    if c.positions == "rope":
        cos_bt1k, sin_bt1k = (np.asarray(x) for x in vit.axial_rope(c, None))
        cos = graph.array(cos_bt1k[0].transpose(1, 0, 2))
        sin = graph.array(sin_bt1k[0].transpose(1, 0, 2))
        turns = (cos, sin)
    for i in range(c.depth):
        weights = {name: stacked[i] for name, stacked in params["blocks"].items()}
        x_btd = _layer(graph, c, weights, x_btd, turns, f"encoder/blocks/{i}")
    if c.norm == "tokens":
        x_btd = graph("LayerNormalization", x_btd, params["scale"], params["bias"], epsilon=c.eps)
    end = c.n_cls + c.n_patches
    return graph.slice(x_btd, 0, c.n_cls, 1), graph.slice(x_btd, c.n_cls, end, 1)


def _layer(
    graph: Graph,
    c: Config,
    w: Mapping[str, np.ndarray],
    x_btd: str,
    turns: tuple[str, str] | None,
    name: str,
) -> str:
    """Return a layer of `vit.run_stack`, by its weights ``w``."""
    d, h, m = c.embed, c.heads, c.stack.hidden
    k = d // h

    def norm(x: str, scale: np.ndarray, bias: np.ndarray) -> str:
        return graph("LayerNormalization", x, scale, bias, epsilon=c.eps)

    def product(x: str, matrix: str, shape: tuple[int, int]) -> str:
        return graph("MatMul", x, graph.array(w[matrix].reshape(shape), f"{name}/{matrix}"))

    z = norm(x_btd, w["scale_attention"], w["bias_attention"])
    qkv = graph("Add", product(z, "w_qkv", (d, 3 * d)), w["b_qkv"].reshape(-1))
    qkv = graph("Reshape", qkv, [0, 0, 3, h, k])
    qkv = graph("Transpose", qkv, perm=[2, 0, 3, 1, 4])
    q_bhtk, k_bhtk, v_bhtk = (graph("Squeeze", part, [0]) for part in graph.split(qkv, 3, axis=0))
    if c.qk_norm:
        q_bhtk = norm(q_bhtk, w["scale_q"], w["bias_q"])
        k_bhtk = norm(k_bhtk, w["scale_k"], w["bias_k"])
    if turns:
        q_bhtk = _turned(graph, q_bhtk, turns, k)
        k_bhtk = _turned(graph, k_bhtk, turns, k)
    q_bhtk = graph("Mul", q_bhtk, 1 / math.sqrt(k))
    scores = graph("MatMul", q_bhtk, graph("Transpose", k_bhtk, perm=[0, 1, 3, 2]))
    y = graph("MatMul", graph("Softmax", scores), v_bhtk)
    y = graph("Reshape", graph("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, d])
    y = graph("Add", product(y, "w_out", (d, d)), w["b_out"])
    if c.layer_scale:
        y = graph("Mul", y, w["scale_added_attention"])
    x_btd = graph("Add", x_btd, y)

    z = norm(x_btd, w["scale_mlp"], w["bias_mlp"])
    if c.stack.gated:
        gate = product(z, "w_gate", (d, m))
        gate = graph("Mul", gate, graph("Sigmoid", gate))
        y = graph("Mul", gate, product(z, "w_up", (d, m)))
        y = product(y, "w_down", (m, d))
    else:
        y = graph("Add", product(z, "w_up", (d, m)), w["b_up"])
        y = graph("Gelu", y, approximate="none" if c.stack.exact else "tanh")
        y = graph("Add", product(y, "w_down", (m, d)), w["b_down"])
    if c.layer_scale:
        y = graph("Mul", y, w["scale_added_mlp"])
    return graph("Add", x_btd, y)


def _turned(graph: Graph, x_bhtk: str, turns: tuple[str, str], k: int) -> str:
    """`layers.rotate` by cos and sin [1, T, K / 2]."""
    a = graph.slice(x_bhtk, 0, k // 2, 3)
    b = graph.slice(x_bhtk, k // 2, k, 3)
    cos, sin = turns
    turned_a = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
    turned_b = graph("Add", graph("Mul", b, cos), graph("Mul", a, sin))
    return graph("Concat", turned_a, turned_b, axis=3)


def _scores(graph: Graph, head: Head, features: str) -> None:
    """Add the output "scores" [B, C]."""
    x, w = features, head.weights
    if head.kind == "probe":
        x = graph("LayerNormalization", x, w["scale"], w["bias"], epsilon=vit.EPS)
    z = graph("Add", graph("MatMul", x, w["w"]), w["b"])
    # a softmax is along the last axis
    graph("Softmax" if head.softmax else "Sigmoid", z, output="scores")


def _outside(onnx: Any, model: Any) -> dict[str, bytes]:
    """Move the arrays of a model into a file next to it: its name -> content."""
    content = bytearray()
    for array in model.graph.initializer:
        n_bytes = len(array.raw_data)
        if n_bytes < PAGE:
            continue
        content += bytes(-len(content) % PAGE)
        onnx.external_data_helper.set_external_data(
            array, DATA, offset=len(content), length=n_bytes
        )
        content += array.raw_data
        array.ClearField("raw_data")
        array.data_location = onnx.TensorProto.EXTERNAL
    return {DATA: bytes(content)}


def _of_run(
    config: Mapping[str, Any], arrays: Mapping[str, Stored], about: Mapping[str, str]
) -> dict[str, bytes]:
    c = run_workload.section_of(config, "model", Config)
    return files(c, config.get("data") or {}, arrays, about)


FORMAT = Format(files=_of_run, example=COMMAND)
