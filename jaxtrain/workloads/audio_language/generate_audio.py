"""Answers prompts with sound, by a trained audio language model: codes, WAVs, spectrograms."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.telemetry import writers
from jaxtrain.types import PyTree
from jaxtrain.workloads.audio_language import decoding
from jaxtrain.workloads.audio_language.model import Config, make_specs
from loaders.base import narrowed
from loaders.chat import chat_audio, chat_examples, chatml, codec
from loaders.io import atomic_write, files


class Speaker(NamedTuple):
    """A model with the tools of its data, its tokenizer among them, and its codec."""

    model: Config
    params: PyTree
    tools: chat_examples.Tools
    codec: codec.Codec | None


class Answer(NamedTuple):
    text: str
    codes: list[np.ndarray]  # int32 [K, T] of each recording in it


def load(
    run: str,
    *,
    step: int | None = None,
    ema: bool = False,
    tokenizer: str = "",
    codec_path: str = "",
) -> Speaker:
    """Read a model with the tokenizer and the codec that it was trained with, or others.

    ``run`` is a run, a step or an export. Raises StoredError if it is none of them, or holds
    adapters alone, and WarmStartError, ConfigError, DataError.
    """
    source = source_lib.find(run, step)
    run_config = source.config(__package__)
    model = run_workload.model_section(run_config, Config)
    if missing := [
        name for name in ("vocab", "codebooks", "codebook_size") if getattr(model, name) is None
    ]:
        raise StoredError(
            f"{source.path}: its config does not say model.{', model.'.join(missing)}: it is"
            " damaged"
        )
    chosen = tokenizer or run_workload.exported_file(source, "tokenizer.json")
    changes = {"tokenizer": chosen} if chosen else {}
    changes |= {"codec": codec_path, "codes": ""} if codec_path else {}
    run_data = run_config.get("data") or {}
    theirs = run_data.get("codec")
    # module:function would be imported, and the run may be anyone's.
    if (
        not codec_path
        and isinstance(theirs, str)
        and theirs
        and not files.expanded(theirs).is_file()
    ):
        raise StoredError(
            f"{source.path}: the run's codec is {theirs!r}, which is no file here; name a"
            " codec.npz, or that function if you trust its code, with --codec"
        )
    if not chosen:
        path = run_data.get("tokenizer")
        run_workload.refuse_other_file(source, "data.tokenizer", path, "--tokenizer")
    if not codec_path:
        run_workload.refuse_other_file(source, "data.codec", theirs, "--codec")
    data = config_lib.section(chat_audio.Config, run_data | changes)
    params = stored_params.read(source, make_specs(model), stored_params.one_device(), ema=ema)
    tools = chat_examples.tools_of(data, data.manifest)
    voice = chat_examples.open_codec(data) if data.codec else None
    return Speaker(model, params, tools, voice)


def speak(
    speaker: Speaker,
    prompts: Sequence[str],
    *,
    seconds: float,
    streams: decoding.Streams,
    seed: int = 0,
    text_first: bool = False,
    batch: int = 16,
) -> list[Answer]:
    """Generate an answer to each prompt, ``batch`` at a time: its text and recordings."""
    c, tools = speaker.model, speaker.tools
    rows = []
    for prompt in prompts:
        pieces = chatml.render(
            {
                "messages": [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": []},
                ]
            }
        )
        tokens, labels, _ = chatml.tokenise(pieces[:-1], tools.encode)
        opening = [] if text_first else [tools.ids[chatml.AUDIO_OUT_BOS]]
        tokens = narrowed(np.concatenate([tokens, opening]), np.int32, "the tokens")
        rows.append(tools.expand(tokens, np.full_like(tokens, chatml.NONE), []))
    longest = round(seconds * tools.frame_rate)
    shape = (max(len(x.tokens) for x in rows), 1, 1, 1)
    layout = stored_params.one_device()
    opens, closes, ends = (
        tools.ids[name] for name in (chatml.AUDIO_OUT_BOS, chatml.AUDIO_EOS, chatml.END_OF_TURN)
    )
    grammar = decoding.Grammar(opens, closes, ends, tools.delay, longest)
    n_new = longest + 1 + c.codebooks + (64 if text_first else 8)

    @jax.jit
    def run(
        params: PyTree, prompt: dict[str, Any], length_b: jax.Array, key: jax.Array
    ) -> decoding.Written:
        return decoding.generate(
            c, params, prompt, length_b, key, layout.shard, grammar, n_new=n_new, streams=streams
        )

    answers: list[Answer] = []
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        some = some + some[:1] * (batch - len(some))  # one program for all
        laid = [chatml.row(x, shape, tools.pad) for x in some]
        context = {
            name: jnp.asarray(np.stack([x[name] for x in laid]))
            for name in ("text", "codes", "place", "slot")
        }
        length_b = jnp.array([len(x.tokens) for x in some], jnp.int32)
        written = jax.device_get(
            run(speaker.params, context, length_b, jax.random.fold_in(jax.random.key(seed), start))
        )
        each = list(_answers(speaker, written))
        answers += each[: len(rows) - start]
    return answers


def _answers(speaker: Speaker, written: decoding.Written) -> Iterator[Answer]:
    tools = speaker.tools
    for tokens, columns in zip(
        np.asarray(written.tokens), np.asarray(written.columns), strict=True
    ):
        is_audio = columns[:, 0] >= 0
        edges = np.flatnonzero(np.diff(np.concatenate([[0], is_audio, [0]])))
        clips = [
            chatml.undelayed(columns[a:b], delay=tools.delay)
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
        # A recording that was cut off by the end of the buffer may hold begins and ends.
        clips = [x[:, : int((x < tools.size).all(0).cumprod().sum())] for x in clips]
        special = set(tools.ids.values())
        text = tools.tokenizer.decode([t for t in tokens[tokens >= 0].tolist() if t not in special])
        yield Answer(text, clips)


def write(
    speaker: Speaker,
    out: pathlib.Path,
    prompts: Sequence[str],
    answers: Sequence[Answer],
    each: int,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        line: dict[str, Any] = {"prompt": prompt, "text": answer.text}
        for codes in answer.codes[:1]:
            name = f"{i // each:03}-{i % each}"
            atomic_write.save(out / f"{name}.npy", narrowed(codes, np.int16, "the codes"))
            line |= {"file": f"{name}.npy", "seconds": codes.shape[1] / speaker.tools.frame_rate}
            if isinstance(speaker.codec, codec.Rvq) and codes.shape[1]:
                mel = speaker.codec.decode(codes)
                codec.write_wav(out / f"{name}.wav", codec.sound(mel))
                picture = (mel - mel.min()) / max(float(np.ptp(mel)), 1e-6)
                try:
                    with atomic_write.naming(out / f"{name}.png"):
                        writers.write_pictures(out, {f".{name}": picture.T[None]})
                        (out / f".{name}_0.png").rename(out / f"{name}.png")
                finally:
                    (out / f".{name}_0.png").unlink(missing_ok=True)
        lines.append(json.dumps(line, ensure_ascii=False))
        print(lines[-1])
    atomic_write.write(out / "answers.jsonl", "".join(line + "\n" for line in lines))
