"""Answers prompts with sound, by a trained audio language model: codes, WAVs, spectrograms."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.telemetry import writers
from jaxtrain.types import Key, PyTree
from jaxtrain.workloads.audio_language import decoding
from jaxtrain.workloads.audio_language.model import Config, make_specs
from loaders.base import DataError, narrowed
from loaders.chat import chat_audio, chat_examples, chatml, codec
from loaders.io import atomic_write, files

# [places] of an answer besides its recording: with text first, and without
MAX_TEXT = 64
MAX_END = 8


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
    source = source_lib.find_best(run, step)
    run_config = source.config(__package__)
    model = run_workload.model_section(run_config, Config)
    missing = []
    for name in ("vocab", "codebooks", "codebook_size"):
        if getattr(model, name) is None:
            missing.append(name)
    if missing:
        raise StoredError(
            f"{source.path}: its config does not say model.{', model.'.join(missing)}: it is"
            " damaged"
        )
    data = _data_config(source, run_config, tokenizer, codec_path)
    one_device = stored_params.one_device()
    params = stored_params.read(source, make_specs(model), one_device, ema=ema)
    tools = chat_examples.tools_of(data, data.manifest)
    voice = None
    if data.codec:
        voice = chat_examples.open_codec(data)
    _refuse_other_sizes(source, model, tools)
    return Speaker(model, params, tools, voice)


def _refuse_other_sizes(
    source: source_lib.Source, model: Config, tools: chat_examples.Tools
) -> None:
    """Raise DataError for a tokenizer or a codec that the model's outputs do not fit."""
    for name, of_model, here in (
        ("codebooks", model.codebooks, tools.codebooks),
        ("codebook_size", model.codebook_size, tools.size),
    ):
        if here != of_model:
            raise DataError(
                f"the codec has {name} = {here}, and the model of {source.path} has {of_model};"
                " name the one that its codes were made with, with --codec"
            )
    largest = max(tools.ids.values())
    if largest >= (model.vocab or 0):
        raise DataError(
            f"the tokenizer has a special token {largest}, and the model of {source.path} has"
            f" {model.vocab} tokens; name the one that it was trained with, with --tokenizer"
        )


def _data_config(
    source: source_lib.Source, run_config: Mapping[str, Any], named: str, codec_path: str
) -> chat_audio.Config:
    """Return the run's section ``data``, with another tokenizer or codec if one is ``named``."""
    run_data = run_config.get("data") or {}
    run_codec = run_data.get("codec")
    changes = {}
    exported = run_workload.exported_file(source, "tokenizer.json")
    run_tokenizer = run_data.get("tokenizer")
    if named:
        own = exported or run_tokenizer
        run_workload.warn_of_other_file(source, "data.tokenizer", own, named, "--tokenizer")
    if codec_path:
        run_workload.warn_of_other_file(source, "data.codec", run_codec, codec_path, "--codec")
    tokenizer = named or exported
    if tokenizer:
        changes["tokenizer"] = tokenizer
    if codec_path:
        changes["codec"] = codec_path
        changes["codes"] = ""
    elif isinstance(run_codec, str) and run_codec:
        # module:function would be imported, and the run may be anyone's.
        if not files.expanded(run_codec).is_file():
            raise StoredError(
                f"{source.path}: the run's codec is {run_codec!r}, which is no file here; name a"
                " codec.npz, or that function if you trust its code, with --codec"
            )
    if not tokenizer:
        run_workload.refuse_other_file(source, "data.tokenizer", run_tokenizer, "--tokenizer")
    if not codec_path:
        run_workload.refuse_other_file(source, "data.codec", run_codec, "--codec")
    data: chat_audio.Config = config_lib.section(chat_audio.Config, run_data | changes)
    return data


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
    c = speaker.model
    tools = speaker.tools
    longest = round(seconds * tools.frame_rate)
    grammar = decoding.Grammar(
        opens=tools.ids[chatml.AUDIO_OUT_BOS],
        closes=tools.ids[chatml.AUDIO_EOS],
        ends=tools.ids[chatml.END_OF_TURN],
        delay=tools.delay,
        longest=longest,
    )
    n_columns = longest + 1 + c.codebooks
    n_tokens = MAX_TEXT if text_first else MAX_END
    shard = stored_params.one_device().shard

    @jax.jit
    def run(params: PyTree, rows: decoding.Prompts, key: Key) -> decoding.Continuations:
        return decoding.generate(
            c, params, rows, key, shard, grammar, n_new=n_columns + n_tokens, streams=streams
        )

    rows = [_lay_out(tools, prompt, text_first=text_first) for prompt in prompts]
    n_places = max(len(row.tokens) for row in rows)
    answers: list[Answer] = []
    for start in range(0, len(rows), batch):
        batch_rows = rows[start : start + batch]
        n_spare = batch - len(batch_rows)
        spare_rows = batch_rows[:1] * n_spare  # one program for all
        prompt_rows = _stack(batch_rows + spare_rows, n_places, tools.pad)
        key = jax.random.fold_in(jax.random.key(seed), start)
        tokens, columns = jax.device_get(run(speaker.params, prompt_rows, key))
        for i in range(len(batch_rows)):
            answer = _answer(tools, tokens[i], columns[i])
            answers.append(answer)
    return answers


def _lay_out(tools: chat_examples.Tools, prompt: str, *, text_first: bool) -> chatml.Laid:
    """Lay out a user's turn, and the beginning of an answer: a recording's, or a text's."""
    question = {"role": "user", "content": prompt}
    answer = {"role": "assistant", "content": []}
    pieces = chatml.render({"messages": [question, answer]})
    pieces_to_continue = pieces[:-1]  # without the end of the assistant's turn
    tokens, _, _ = chatml.tokenise(pieces_to_continue, tools.encode)
    if not text_first:
        tokens = np.append(tokens, tools.ids[chatml.AUDIO_OUT_BOS])
    tokens = narrowed(tokens, np.int32, "the tokens")
    labels = np.full_like(tokens, chatml.NONE)
    return tools.expand(tokens, labels, [])


def _stack(rows: Sequence[chatml.Laid], n_places: int, pad: int) -> decoding.Prompts:
    """Return rows of text alone as a batch."""
    shape = (n_places, 1, 1, 1)
    filled_rows = [chatml.row(row, shape, pad) for row in rows]
    fields = {}
    for name in ("text", "codes", "place", "slot"):
        values = [row[name] for row in filled_rows]
        fields[name] = jnp.asarray(np.stack(values))
    lengths = [len(row.tokens) for row in rows]
    return decoding.Prompts(fields, jnp.array(lengths, jnp.int32))


def _answer(tools: chat_examples.Tools, tokens: np.ndarray, columns: np.ndarray) -> Answer:
    """Return the answer of a row: int32 tokens [N], -1 for columns, and columns [N, K]."""
    is_column = columns[:, 0] >= 0
    padded = np.concatenate([[0], is_column, [0]])
    edges = np.flatnonzero(np.diff(padded))
    recordings = []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        codes_kt = chatml.undelayed(columns[start:stop], delay=tools.delay)
        # A recording that was cut off by the end of the buffer may hold begins and ends.
        is_code_t = (codes_kt < tools.size).all(0)
        n_codes = int(is_code_t.cumprod().sum())
        recordings.append(codes_kt[:, :n_codes])
    special = set(tools.ids.values())
    text_tokens = []
    for token in tokens[tokens >= 0].tolist():
        if token not in special:
            text_tokens.append(token)
    return Answer(tools.tokenizer.decode(text_tokens), recordings)


def write(
    speaker: Speaker,
    out: pathlib.Path,
    prompts: Sequence[str],
    answers: Sequence[Answer],
    each: int,
) -> None:
    """Write answers to a folder, ``each`` to a prompt, and print a line of JSON for each one."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        fields: dict[str, Any] = {"prompt": prompt, "text": answer.text}
        if answer.codes:
            codes = answer.codes[0]
            name = f"{i // each:03}-{i % each}"
            _write_recording(speaker, out, name, codes)
            fields["file"] = f"{name}.npy"
            fields["seconds"] = codes.shape[1] / speaker.tools.frame_rate
        line = json.dumps(fields, ensure_ascii=False)
        print(line)
        lines.append(f"{line}\n")
    atomic_write.write(out / "answers.jsonl", "".join(lines))


def _write_recording(speaker: Speaker, out: pathlib.Path, name: str, codes: np.ndarray) -> None:
    """Write codes int [K, T], and by a codec.npz their sound and its spectrogram."""
    int16_codes = narrowed(codes, np.int16, "the codes")
    atomic_write.save(out / f"{name}.npy", int16_codes)
    if not isinstance(speaker.codec, codec.Rvq) or not codes.shape[1]:
        return
    log_mel = speaker.codec.decode(codes)
    codec.write_wav(out / f"{name}.wav", codec.sound(log_mel))
    _write_picture(out, name, log_mel)


def _write_picture(out: pathlib.Path, name: str, log_mel: np.ndarray) -> None:
    """Write a spectrogram [frames, bands] as a PNG file, low bands at the bottom."""
    span = max(float(np.ptp(log_mel)), 1e-6)
    picture = (log_mel - log_mel.min()) / span
    hidden = f".{name}"
    drawn_file = out / f"{hidden}_0.png"
    file = out / f"{name}.png"
    try:
        with atomic_write.naming(file):
            writers.write_pictures(out, {hidden: picture.T[None]})
            drawn_file.rename(file)
    finally:
        drawn_file.unlink(missing_ok=True)
