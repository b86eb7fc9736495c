"""Conversations with text and sound, as sequences for an audio language model.

A manifest is a JSON list of examples:

    {"messages": [{"role": "system" | "user" | "assistant", "content": C, "recipient": "…"}, …],
     "start_index": 2, "speaker": "…", "misc": {…}}
        recipient and the last three may be missing; speaker and misc are ignored
    C is a text, a part or a list of parts:
    {"type": "text", "text": "…"}
    {"type": "audio", "audio_url": "clip.wav", "raw_audio": "…", "offset": 1.5, "duration": 2.0}
        seconds may be missing or null; raw_audio: the recording itself, base64, instead of a file

`render` turns an example into pieces of text, `tokenise` into tokens and their labels, and `expand`
puts the codes of every recording in the place of its token. Labels are assistants' turns from
``start_index`` on (all of them without it): text, ends of turns, the tokens around sound, and the
codes themselves. Headers are never labels, recipients always are.

Codes int [K, T] become K rows of T + 2 with a begin before them and an end after. Row k is shifted
right by k (the delay pattern, Copet et al. 2023, arXiv 2306.05284), with begins and ends in the
gaps: T + 1 + K columns. Column 0 has only begins, and is not predicted. `targets` has the
prediction of each place: the text after it, or the next column *of the same recording*. Shapes: U
places of a row, K codebooks, T frames, J columns of one recording.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.base import DataError
from loaders.io import files

BEGIN = "<|begin_of_text|>"
HEADER = "<|start_header_id|>"
HEADER_END = "<|end_header_id|>"
RECIPIENT = "<|recipient|>"
END_OF_TURN = "<|eot_id|>"
END_OF_MESSAGE = "<|eom_id|>"
AUDIO = "<|AUDIO|>"  # in the place of a recording that is heard
AUDIO_OUT = "<|AUDIO_OUT|>"  # in the place of one that is said
AUDIO_BOS = "<|audio_bos|>"
AUDIO_OUT_BOS = "<|audio_out_bos|>"
AUDIO_EOS = "<|audio_eos|>"
SPECIAL = (
    BEGIN,
    HEADER,
    HEADER_END,
    END_OF_TURN,
    END_OF_MESSAGE,
    AUDIO,
    AUDIO_OUT,
    AUDIO_BOS,
    AUDIO_OUT_BOS,
    AUDIO_EOS,
)
ROLES = ("system", "user", "assistant")
NONE = -100  # no label
MAX_MANIFEST = 4 << 30  # [bytes]


class ExampleError(ValueError):
    """An example that is not a conversation, with the reason."""


class Clip(NamedTuple):
    url: str  # of the file; "" if ``raw`` is the recording
    raw: str = ""  # base64
    offset: float = 0.0  # [s]
    duration: float | None = None  # [s]; None = to the end


class Piece(NamedTuple):
    """A run of text that is tokenised separately."""

    kind: str  # header, recipient, text, audio_in, audio_out, end_of_turn, end_of_message
    text: str
    is_label: bool
    clip: Clip | None = None


class Laid(NamedTuple):
    """A conversation, every recording in the place of its token, labels in their own."""

    tokens: np.ndarray  # int32 [U], AUDIO or AUDIO_OUT throughout a recording
    codes: np.ndarray  # int32 [U, K], -1 outside recordings
    text_labels: np.ndarray  # int32 [U], NONE for recordings
    audio_labels: np.ndarray  # int32 [U, K]
    recording: np.ndarray  # int32 [U] its number in the conversation, -1 outside recordings


class Targets(NamedTuple):
    text_at: np.ndarray  # int32 [N] places whose state predicts a token
    text: np.ndarray  # int32 [N]
    audio_at: np.ndarray  # int32 [M] places whose state predicts a column
    audio: np.ndarray  # int32 [M, K], NONE for a codebook without a label


def read_manifest(path: str | pathlib.Path) -> list[Any]:
    """Read the examples of a manifest, unchecked. Raises DataError: it is no JSON list."""
    try:
        text = files.read_text(files.expanded(path), most=MAX_MANIFEST)
        examples: list[Any] = files.parse(text, str(path), kind=list)
    except files.FileError as error:
        raise DataError(
            f"{path} cannot be read as a manifest, a JSON list of examples: {error}"
        ) from error
    return examples


def render(example: Any) -> list[Piece]:
    """Return an example as pieces: joined, they are the conversation. Raises ExampleError."""
    messages, start_index = _messages(example)
    roles = [message["role"] for message in messages]
    next_roles = [*roles[1:], ""]
    pieces: list[Piece] = []
    for i, message in enumerate(messages):
        is_answer = roles[i] == "assistant"
        is_label = is_answer and (start_index is None or i >= start_index)
        begin = "" if i else BEGIN
        header = f"{begin}{HEADER}{roles[i]}{HEADER_END}\n\n"
        pieces.append(Piece("header", header, False))
        recipient = message.get("recipient")
        if recipient:
            if not is_answer:
                raise ExampleError(
                    f"message {i} of role {roles[i]} has a recipient, which only an assistant's may"
                    " have"
                )
            pieces.append(Piece("recipient", f"{recipient}{RECIPIENT}", True))
        for part in _parts(message.get("content"), i):
            pieces.append(_content(part, is_answer, is_label))
        if is_answer and next_roles[i] == "assistant":
            end = Piece("end_of_message", END_OF_MESSAGE, is_label)
        else:
            end = Piece("end_of_turn", END_OF_TURN, is_label)
        pieces.append(end)
    return pieces


def _messages(example: Any) -> tuple[list[Mapping[str, Any]], int | None]:
    """Return the checked messages of an example, and its start_index. Raises ExampleError."""
    if not isinstance(example, Mapping):
        raise ExampleError("it has no messages")
    messages = example.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ExampleError("it has no messages")
    start_index = example.get("start_index")
    is_number = isinstance(start_index, int) and not isinstance(start_index, bool)
    if start_index is not None and not is_number:
        raise ExampleError(f"start_index is {start_index!r}; expected a turn's number or null")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ExampleError(f"message {i} has no role; expected one of: {', '.join(ROLES)}")
    return messages, start_index


def _content(part: str | Clip, is_answer: bool, is_label: bool) -> Piece:
    """Return the piece of a text or a recording, which an assistant says or hears."""
    if isinstance(part, str):
        return Piece("text", part, is_label)
    if is_answer:
        tokens = f"{AUDIO_OUT_BOS}{AUDIO_OUT}{AUDIO_EOS}"
        return Piece("audio_out", tokens, is_label, part)
    return Piece("audio_in", f"{AUDIO_BOS}{AUDIO}{AUDIO_EOS}", False, part)


def _parts(content: Any, i: int) -> list[str | Clip]:
    """Return the texts and recordings of message ``i``, in order. Raises ExampleError."""
    if not isinstance(content, list):
        return [_part(content, i)]
    return [_part(part, i) for part in content]


def _part(part: Any, i: int) -> str | Clip:
    """Return one text or recording of message ``i``. Raises ExampleError."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type")
        text = part.get("text")
        if kind == "text" and isinstance(text, str):
            return text
        if kind == "audio":
            return _clip(part, i)
    raise ExampleError(
        f"message {i} has the content {str(part)[:80]!r}; expected a text, a text part or"
        " an audio part"
    )


def _clip(part: Mapping[str, Any], i: int) -> Clip:
    """Return the recording of an audio part of message ``i``. Raises ExampleError."""
    clip = Clip(
        url=part.get("audio_url") or "",
        raw=part.get("raw_audio") or "",
        offset=part.get("offset") or 0.0,
        duration=part.get("duration"),
    )
    is_text = isinstance(clip.url, str) and isinstance(clip.raw, str)
    if not is_text or not (clip.url or clip.raw):
        raise ExampleError(f"message {i} has an audio part with neither audio_url nor raw_audio")
    for seconds in (clip.offset, clip.duration):
        if seconds is None:
            continue
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise ExampleError(
                f"message {i} has an audio part with offset {clip.offset!r}, duration"
                f" {clip.duration!r}"
            )
    return clip


def clips_of(pieces: Sequence[Piece]) -> list[Clip]:
    """Return the recordings of a conversation, in order."""
    return [piece.clip for piece in pieces if piece.clip is not None]


def tokenise(
    pieces: Sequence[Piece], encode: Callable[[str], Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, list[Clip]]:
    """Return tokens int32 [n], labels int32 [n], or `NONE`, and the recordings in order."""
    tokens: list[int] = []
    labels: list[int] = []
    for piece in pieces:
        ids = list(encode(piece.text))
        no_labels = [NONE] * len(ids)
        tokens += ids
        labels += ids if piece.is_label else no_labels
    token_ids = np.array(tokens, np.int32)
    label_ids = np.array(labels, np.int32)
    return token_ids, label_ids, clips_of(pieces)


def delayed(codes_kt: np.ndarray, size: int, *, delay: bool = True) -> np.ndarray:
    """Return columns int32 [J, K]: begin (``size``), T codes, end, and K - 1 more if delayed."""
    return _shifted(codes_kt, size, size, size + 1, delay)


def delayed_labels(codes_kt: np.ndarray, size: int, *, delay: bool = True) -> np.ndarray:
    """Return the labels of columns, int32 [J, K]: codes and ends, not begins and gaps."""
    return _shifted(codes_kt, size, NONE, NONE, delay)


def _shifted(codes_kt: np.ndarray, size: int, begin: int, gap: int, delay: bool) -> np.ndarray:
    """Return columns int32 [J, K] with ``begin`` before each codebook's codes, ``gap`` after."""
    n_codebooks, n_times = codes_kt.shape
    shifts = np.arange(n_codebooks) * delay
    n_columns = n_times + 2 + shifts.max(initial=0)
    columns_jk = np.full((n_columns, n_codebooks), gap, np.int32)
    for k, shift in enumerate(shifts):
        first = shift + 1
        end = first + n_times
        columns_jk[:first, k] = begin
        columns_jk[first:end, k] = codes_kt[k]
        columns_jk[end, k] = size + 1
    return columns_jk


def undelayed(columns_jk: np.ndarray, *, delay: bool = True) -> np.ndarray:
    """Return the codes int32 [K, T] of a recording's columns, of times that all codebooks have."""
    n_columns, n_codebooks = columns_jk.shape
    largest_shift = (n_codebooks - 1) * delay
    n_times = max(n_columns - largest_shift - 2, 0)
    codes = []
    for k in range(n_codebooks):
        first = 1 + k * delay
        codes.append(columns_jk[first : first + n_times, k])
    return np.stack(codes).astype(np.int32)


def expand(
    tokens: np.ndarray,
    labels: np.ndarray,
    audios: Sequence[np.ndarray],
    *,
    audio_in: int,
    audio_out: int,
    size: int,
    codebooks: int,
    delay: bool = True,
) -> Laid:
    """Put the columns of ``audios`` [K, T] in place of the tokens ``audio_in`` and ``audio_out``.

    They come in order. A recording is predicted if its token is an ``audio_out`` with a label.
    Raises ExampleError if there are more or fewer recordings than such tokens.
    """
    is_place = (tokens == audio_in) | (tokens == audio_out)
    places = np.flatnonzero(is_place).tolist()
    if len(places) != len(audios):
        raise ExampleError(f"it has {len(audios)} recordings and {len(places)} places for them")
    runs = []
    start = 0
    for number, (place, codes_kt) in enumerate(zip(places, audios, strict=True)):
        text = _text_run(tokens[start:place], labels[start:place], codebooks)
        columns_jk = delayed(codes_kt, size, delay=delay)
        if tokens[place] == audio_out and labels[place] != NONE:
            labels_jk = delayed_labels(codes_kt, size, delay=delay)
        else:
            labels_jk = np.full_like(columns_jk, NONE)
        runs.append(text)
        runs.append(_recording_run(tokens[place], columns_jk, labels_jk, number))
        start = place + 1
    runs.append(_text_run(tokens[start:], labels[start:], codebooks))
    return _joined(runs)


def _text_run(tokens: np.ndarray, labels: np.ndarray, codebooks: int) -> Laid:
    """Lay out text without recordings."""
    n = len(tokens)
    no_codes = np.full((n, codebooks), -1)
    no_audio_labels = np.full((n, codebooks), NONE)
    no_recording = np.full(n, -1)
    return Laid(tokens, no_codes, labels, no_audio_labels, no_recording)


def _recording_run(token: int, columns_jk: np.ndarray, labels_jk: np.ndarray, number: int) -> Laid:
    """Lay out recording ``number`` of a conversation, in the place of ``token``."""
    n = len(columns_jk)
    tokens = np.full(n, token)
    no_text_labels = np.full(n, NONE)
    recording = np.full(n, number)
    return Laid(tokens, columns_jk, no_text_labels, labels_jk, recording)


def _joined(runs: Sequence[Laid]) -> Laid:
    """Lay out runs one after the other."""
    arrays = {}
    for name in Laid._fields:
        parts = [getattr(run, name) for run in runs]
        arrays[name] = np.concatenate(parts).astype(np.int32)
    return Laid(**arrays)


def targets(x: Laid) -> Targets:
    """Return each place's prediction: the next text, or the next column of its recording."""
    next_text_label = x.text_labels[1:]
    text_at = np.flatnonzero(next_text_label != NONE)
    next_recording = x.recording[1:]
    is_inside = (next_recording >= 0) & (next_recording == x.recording[:-1])
    next_audio_labels = x.audio_labels[1:]
    has_label = (next_audio_labels != NONE).any(1)
    audio_at = np.flatnonzero(is_inside & has_label)
    return Targets(
        text_at=text_at.astype(np.int32),
        text=next_text_label[text_at],
        audio_at=audio_at.astype(np.int32),
        audio=next_audio_labels[audio_at],
    )


def row(x: Laid, shape: tuple[int, int, int, int], pad: int) -> dict[str, np.ndarray]:
    """One row of `jaxtrain.workloads.audio_language`'s batch, without label_scale.

    ``shape``: S text tokens, A columns, N and M labels, each at least those of ``x``; spare places
    are at the end. ``pad``: the token of spare places.
    """
    s, a, n, m = shape
    k = x.codes.shape[1]
    text = np.flatnonzero(x.recording < 0)
    audio = np.flatnonzero(x.recording >= 0)
    n_places = len(x.tokens)
    n_spare_text = s - len(text)
    n_spare_audio = a - len(audio)
    spare = n_places + np.arange(n_spare_text + n_spare_audio)
    spare_text = spare[:n_spare_text]
    spare_audio = spare[n_spare_text:]
    place = np.concatenate([text, spare_text, audio, spare_audio])
    slot = np.empty(s + a, np.int32)
    slot[place] = np.arange(s + a)
    labels = targets(x)
    return {
        "text": _padded(x.tokens[text], (s,), pad),
        "codes": _padded(x.codes[audio], (a, k), 0),
        "place": place.astype(np.int32),
        "slot": slot,
        "text_at": _padded(labels.text_at, (n,), 0),
        "text_target": _padded(labels.text, (n,), NONE),
        "audio_at": _padded(labels.audio_at, (m,), 0),
        "audio_target": _padded(labels.audio, (m, k), NONE),
    }


def _padded(values: np.ndarray, shape: tuple[int, ...], filler: int) -> np.ndarray:
    padded = np.full(shape, filler, np.int32)
    padded[: len(values)] = values
    return padded


def label_scale(n_text: int, n_audio: np.ndarray, rows: int) -> np.ndarray:
    """Return the scales of labels, float32 [1 + K]: ``rows`` over ``n_text`` and ``n_audio`` [K].

    These count the labels of a global batch. Cross-entropies summed over rows, times these and
    divided by ``rows``, are the mean over text plus the mean over codebooks of their means.
    """
    n_labels = np.concatenate([[n_text], n_audio]).astype(np.float64)
    n_used = max(int(np.count_nonzero(n_audio)), 1)  # codebooks that have a label
    share = np.full(len(n_labels), 1 / n_used)
    share[0] = 1
    scale = rows * share / np.maximum(n_labels, 1)
    return np.where(n_labels > 0, scale, 0).astype(np.float32)
