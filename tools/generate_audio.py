"""Has exported weights of an audio language model go on with prompts: codes, WAV files and spectrograms.

    python -m tools.generate_audio WEIGHTS "a dog" "rain" --out DIR [--each 4] [--temperature 0.9] [--top-k 50]

    DIR/000-0.npy    int16 [K, T]: the codes of prompt 0's first answer
    DIR/000-0.wav    what a codec.npz makes of them (another codec's codes are only written)
    DIR/000-0.png    its log-mel spectrogram, low bands at the bottom
    DIR/answers.jsonl  {"prompt", "text", "file", "seconds"} of each answer

WEIGHTS is a folder of tools/orbax_to_safetensors.py; tokenizer, codec and delay are those that the run was trained with, unless
--tokenizer and --codec say others. A prompt is a user's turn, which an assistant answers with a recording, or, with --text, as
it will. --temperature and --top-k take one number for all codebooks, or one for each.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import specs, writers
from jaxtrain.checkpoint import read as stored
from jaxtrain.checkpoint import warm_start
from jaxtrain.types import PyTree
from jaxtrain.workloads import audio_language
from loaders import chat_audio, chat_samples, chatml, codec
from loaders.base import DataError
from tools import encode_audio


class Speaker(NamedTuple):
    """A model, and what it reads and speaks through."""

    model: audio_language.Config
    params: PyTree
    tools: chat_samples.Tools
    tokenizer: Any
    codec: codec.Codec | None


class Answer(NamedTuple):
    text: str
    codes: list[np.ndarray]  # int32 [K, T] of each recording in it


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.generate_audio", description=__doc__.splitlines()[0])
    parser.add_argument("weights", metavar="WEIGHTS")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--each", type=int, default=1, help="answers to each prompt; default: 1")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a recording, at most; default: 10")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--top-k", type=int, nargs="+", default=[0])
    parser.add_argument("--text", action="store_true", help="let the answer begin with text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--codec", default="")
    args = parser.parse_args(argv)
    streams = audio_language.Streams(temperature=tuple(args.temperature), top_k=tuple(args.top_k))
    try:
        speaker = load(args.weights, tokenizer=args.tokenizer, codec_path=args.codec)
        prompts = [prompt for prompt in args.prompts for _ in range(args.each)]
        answers = speak(speaker, prompts, seconds=args.seconds, streams=streams, seed=args.seed, text_first=args.text)
        write(speaker, args.out, prompts, answers, args.each)
    except (DataError, stored.StoredError, warm_start.WarmStartError, config_lib.ConfigError) as error:
        print(f"tools.generate_audio: {error}", file=sys.stderr)
        return 2
    return 0


def load(weights: str, *, tokenizer: str = "", codec_path: str = "") -> Speaker:
    """Of an exported folder. Raises StoredError: it was not exported by us."""
    folder = pathlib.Path(weights).expanduser()
    try:
        run = json.loads((folder / stored.EXPORT).read_text())["config"]
    except (OSError, ValueError, KeyError) as error:
        raise stored.StoredError(
            f"{folder} has no {stored.EXPORT} ({error}); name a folder that tools.orbax_to_safetensors made of a run"
        ) from error
    model = config_lib.section(audio_language.Config, run["model"])
    changes = {"tokenizer": tokenizer} if tokenizer else {}
    changes |= {"codec": codec_path, "codes": ""} if codec_path else {}
    data = config_lib.section(chat_audio.Config, run["data"] | changes)
    layout = layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    abstract = specs.abstract(audio_language.make_specs(model), layout)
    paths = specs.paths(abstract)
    table = {p: (x.shape, x.dtype) for p, x in zip(paths, jax.tree.leaves(abstract), strict=True)}
    rules = config_lib.WarmStart(source=str(folder))
    found = warm_start.load(warm_start.match(table, warm_start.open_source(rules), rules), abstract)
    params = jax.tree.unflatten(jax.tree.structure(abstract), [found[p] for p in paths])
    tools = chat_samples.tools_of(data, data.manifest)
    voice = chat_samples.open_codec(data) if data.codec else None
    return Speaker(model, params, tools, chat_samples.read_tokenizer(data.tokenizer), voice)


def speak(
    speaker: Speaker,
    prompts: Sequence[str],
    *,
    seconds: float,
    streams: audio_language.Streams,
    seed: int = 0,
    text_first: bool = False,
    batch: int = 16,
) -> list[Answer]:
    """Answers, ``batch`` prompts at a time: their texts and recordings."""
    c, tools = speaker.model, speaker.tools
    rows = []
    for prompt in prompts:
        pieces = chatml.render({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": []}]})
        tokens, labels, _ = chatml.tokenise(pieces[:-1], tools.encode)
        opening = [] if text_first else [tools.ids[chatml.AUDIO_OUT_BOS]]
        tokens = np.concatenate([tokens, opening]).astype(np.int32)
        rows.append(tools.expand(tokens, np.full_like(tokens, chatml.NONE), []))
    longest = round(seconds * tools.frame_rate)
    shape = (max(len(x.tokens) for x in rows), 1, 1, 1)
    layout = layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    n_new = longest + 1 + c.codebooks + (64 if text_first else 8)

    @jax.jit
    def run(params: PyTree, prompt: dict, length_b: jax.Array, key: jax.Array) -> audio_language.Written:
        return audio_language.generate(
            c, params, prompt, length_b, key, layout.shard, n_new=n_new, opens=tools.ids[chatml.AUDIO_OUT_BOS],
            closes=tools.ids[chatml.AUDIO_EOS], ends=tools.ids[chatml.END_OF_TURN], delay=tools.delay, longest=longest,
            streams=streams,
        )  # fmt: skip

    found: list[Answer] = []
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        some = some + some[:1] * (batch - len(some))  # one program for all
        laid = [chatml.row(x, shape, tools.pad) for x in some]
        prompt = {name: jnp.asarray(np.stack([x[name] for x in laid])) for name in ("text", "codes", "place", "slot")}
        length_b = jnp.array([len(x.tokens) for x in some], jnp.int32)
        written = jax.device_get(run(speaker.params, prompt, length_b, jax.random.fold_in(jax.random.key(seed), start)))
        each = list(_answers(speaker, written))
        found += each[: len(rows) - start]
    return found


def _answers(speaker: Speaker, written: audio_language.Written) -> Iterator[Answer]:
    tools = speaker.tools
    for tokens, columns in zip(written.tokens, written.columns, strict=True):
        is_audio = columns[:, 0] >= 0
        edges = np.flatnonzero(np.diff(np.concatenate([[0], is_audio, [0]])))
        clips = [chatml.undelayed(columns[a:b], delay=tools.delay) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        # A recording that was cut off by the end of the room may hold begins and ends.
        clips = [x[:, : int((x < tools.size).all(0).cumprod().sum())] for x in clips]
        special = set(tools.ids.values())
        text = speaker.tokenizer.decode([t for t in tokens[tokens >= 0].tolist() if t not in special])
        yield Answer(text, clips)


def write(speaker: Speaker, out: pathlib.Path, prompts: Sequence[str], answers: Sequence[Answer], each: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        line: dict[str, Any] = {"prompt": prompt, "text": answer.text}
        for codes in answer.codes[:1]:
            name = f"{i // each:03}-{i % each}"
            np.save(out / f"{name}.npy", codes.astype(np.int16))
            line |= {"file": f"{name}.npy", "seconds": codes.shape[1] / speaker.tools.frame_rate}
            if isinstance(speaker.codec, codec.Rvq) and codes.shape[1]:
                mel = speaker.codec.decode(codes)
                encode_audio.write_wav(out / f"{name}.wav", codec.sound(mel))
                picture = (mel - mel.min()) / max(float(np.ptp(mel)), 1e-6)
                writers.write_pictures(out, {name: picture.T[None]})
                (out / f"{name}_0.png").rename(out / f"{name}.png")
        lines.append(json.dumps(line, ensure_ascii=False))
        print(lines[-1])
    (out / "answers.jsonl").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
