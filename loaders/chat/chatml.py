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

BEGIN, AUDIO, AUDIO_OUT = "<|begin_of_text|>", "<|AUDIO|>", "<|AUDIO_OUT|>"
END_OF_TURN, END_OF_MESSAGE = "<|eot_id|>", "<|eom_id|>"
AUDIO_BOS, AUDIO_OUT_BOS, AUDIO_EOS = "<|audio_bos|>", "<|audio_out_bos|>", "<|audio_eos|>"
HEADER, HEADER_END, RECIPIENT = "<|start_header_id|>", "<|end_header_id|>", "<|recipient|>"
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
        examples: list[Any] = files.parse(
            files.read_text(files.expanded(path), most=MAX_MANIFEST), str(path), kind=list
        )
        return examples
    except files.FileError as error:
        raise DataError(
            f"{path} cannot be read as a manifest, a JSON list of examples: {error}"
        ) from error


def render(example: Any) -> list[Piece]:
    """Return an example as pieces: joined, they are the conversation. Raises ExampleError."""
    if (
        not isinstance(example, Mapping)
        or not isinstance(example.get("messages"), list)
        or not example["messages"]
    ):
        raise ExampleError("it has no messages")
    messages, first = example["messages"], example.get("start_index")
    if first is not None and (not isinstance(first, int) or isinstance(first, bool)):
        raise ExampleError(f"start_index is {first!r}; expected a turn's number or null")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ExampleError(f"message {i} has no role; expected one of: {', '.join(ROLES)}")
    pieces = []
    for i, message in enumerate(messages):
        role, is_answer = message["role"], message["role"] == "assistant"
        is_label = is_answer and (first is None or i >= first)
        begin = BEGIN if i == 0 else ""
        pieces.append(Piece("header", f"{begin}{HEADER}{role}{HEADER_END}\n\n", False))
        if recipient := message.get("recipient"):
            if not is_answer:
                raise ExampleError(
                    f"message {i} of role {role} has a recipient, which only an assistant's may"
                    " have"
                )
            pieces.append(Piece("recipient", f"{recipient}{RECIPIENT}", True))
        for part in _parts(message.get("content"), i):
            if isinstance(part, str):
                pieces.append(Piece("text", part, is_label))
            elif is_answer:
                pieces.append(
                    Piece("audio_out", f"{AUDIO_OUT_BOS}{AUDIO_OUT}{AUDIO_EOS}", is_label, part)
                )
            else:
                pieces.append(Piece("audio_in", f"{AUDIO_BOS}{AUDIO}{AUDIO_EOS}", False, part))
        continues = is_answer and i + 1 < len(messages) and messages[i + 1]["role"] == "assistant"
        pieces.append(
            Piece("end_of_message", END_OF_MESSAGE, is_label)
            if continues
            else Piece("end_of_turn", END_OF_TURN, is_label)
        )
    return pieces


def _parts(content: Any, i: int) -> list[str | Clip]:
    """Return the texts and recordings of message ``i``, in order. Raises ExampleError."""
    parts: list[str | Clip] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            parts.append(part)
        elif (
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            parts.append(part["text"])
        elif isinstance(part, Mapping) and part.get("type") == "audio":
            clip = Clip(
                part.get("audio_url") or "",
                part.get("raw_audio") or "",
                part.get("offset") or 0.0,
                part.get("duration"),
            )
            seconds = [x for x in (clip.offset, clip.duration) if x is not None]
            if not (
                isinstance(clip.url, str) and isinstance(clip.raw, str) and (clip.url or clip.raw)
            ):
                raise ExampleError(
                    f"message {i} has an audio part with neither audio_url nor raw_audio"
                )
            if not all(isinstance(x, int | float) and x >= 0 for x in seconds):
                raise ExampleError(
                    f"message {i} has an audio part with offset {clip.offset!r}, duration"
                    f" {clip.duration!r}"
                )
            parts.append(clip)
        else:
            raise ExampleError(
                f"message {i} has the content {str(part)[:80]!r}; expected a text, a text part or"
                " an audio part"
            )
    return parts


def tokenise(
    pieces: Sequence[Piece], encode: Callable[[str], Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, list[Clip]]:
    """Return tokens int32 [n], labels int32 [n], or `NONE`, and the recordings in order."""
    tokens: list[int] = []
    labels: list[int] = []
    for piece in pieces:
        ids = list(encode(piece.text))
        tokens += ids
        labels += ids if piece.is_label else [NONE] * len(ids)
    return (
        np.array(tokens, np.int32),
        np.array(labels, np.int32),
        [p.clip for p in pieces if p.clip is not None],
    )


def delayed(codes_kt: np.ndarray, size: int, *, delay: bool = True) -> np.ndarray:
    """Return columns int32 [J, K]: begin (``size``), T codes, end, and K - 1 more if delayed."""
    return _shifted(codes_kt, size, size, size + 1, delay)


def delayed_labels(codes_kt: np.ndarray, size: int, *, delay: bool = True) -> np.ndarray:
    """Return the labels of columns, int32 [J, K]: codes and ends, not begins and gaps."""
    return _shifted(codes_kt, size, NONE, NONE, delay)


def _shifted(codes_kt: np.ndarray, size: int, before: int, after: int, delay: bool) -> np.ndarray:
    k, t = codes_kt.shape
    shifts = np.arange(k) if delay else np.zeros(k, int)
    columns = np.full((t + 2 + shifts.max(initial=0), k), after, np.int32)
    for i, shift in enumerate(shifts):
        columns[: shift + 1, i] = before
        columns[shift + 1 : shift + 1 + t, i] = codes_kt[i]
        columns[shift + 1 + t, i] = size + 1
    return columns


def undelayed(columns_jk: np.ndarray, *, delay: bool = True) -> np.ndarray:
    """Return the codes int32 [K, T] of a recording's columns, of times that all codebooks have."""
    j, k = columns_jk.shape
    t = max(j - (k - 1 if delay else 0) - 2, 0)
    return np.stack([columns_jk[1 + i * delay : 1 + i * delay + t, i] for i in range(k)]).astype(
        np.int32
    )


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
    places = np.flatnonzero((tokens == audio_in) | (tokens == audio_out))
    if len(places) != len(audios):
        raise ExampleError(f"it has {len(audios)} recordings and {len(places)} places for them")
    runs: list[tuple[np.ndarray, ...]] = []  # the fields of `Laid`, run by run
    start = 0

    def blank(n: int, value: int) -> np.ndarray:
        return np.full((n, codebooks), value, np.int32)

    def text(stop: int) -> tuple[np.ndarray, ...]:
        n = stop - start
        return tokens[start:stop], blank(n, -1), labels[start:stop], blank(n, NONE), np.full(n, -1)

    for i, (place, codes) in enumerate(zip(places.tolist(), audios, strict=True)):
        runs.append(text(place))
        columns = delayed(codes, size, delay=delay)
        n, is_label = len(columns), tokens[place] == audio_out and labels[place] != NONE
        audio_labels = delayed_labels(codes, size, delay=delay) if is_label else blank(n, NONE)
        runs.append(
            (np.full(n, tokens[place]), columns, np.full(n, NONE), audio_labels, np.full(n, i))
        )
        start = place + 1
    runs.append(text(len(tokens)))
    return Laid(*(np.concatenate(x).astype(np.int32) for x in zip(*runs, strict=True)))


def targets(x: Laid) -> Targets:
    """Return each place's prediction: the next text, or the next column of its recording."""
    text_at = np.flatnonzero(x.text_labels[1:] != NONE)
    inside = (x.recording[1:] == x.recording[:-1]) & (x.recording[1:] >= 0)
    audio_at = np.flatnonzero(inside & (x.audio_labels[1:] != NONE).any(1))
    return Targets(
        text_at.astype(np.int32),
        x.text_labels[text_at + 1],
        audio_at.astype(np.int32),
        x.audio_labels[audio_at + 1],
    )


def row(x: Laid, shape: tuple[int, int, int, int], pad: int) -> dict[str, np.ndarray]:
    """One row of `jaxtrain.workloads.audio_language`'s batch, without label_scale.

    ``shape``: S text tokens, A columns, N and M labels, each at least those of ``x``; spare places
    are at the end. ``pad``: the token of spare places.
    """
    s, a, n, m = shape
    text, audio = np.flatnonzero(x.recording < 0), np.flatnonzero(x.recording >= 0)
    spare = s - len(text)
    place = np.concatenate(
        [
            text,
            len(x.tokens) + np.arange(spare),
            audio,
            len(x.tokens) + spare + np.arange(a - len(audio)),
        ]
    )
    slot = np.empty(s + a, np.int32)
    slot[place] = np.arange(s + a)
    t, k = targets(x), x.codes.shape[1]

    def fill(values: np.ndarray, shape: int | tuple[int, int], value: int) -> np.ndarray:
        out = np.full(shape, value, np.int32)
        out[: len(values)] = values
        return out

    return {
        "text": fill(x.tokens[text], s, pad),
        "codes": fill(x.codes[audio], (a, k), 0),
        "place": place.astype(np.int32),
        "slot": slot,
        "text_at": fill(t.text_at, n, 0),
        "text_target": fill(t.text, n, NONE),
        "audio_at": fill(t.audio_at, m, 0),
        "audio_target": fill(t.audio, (m, k), NONE),
    }


def label_scale(n_text: int, n_audio: np.ndarray, rows: int) -> np.ndarray:
    """Return the scales of labels, float32 [1 + K]: ``rows`` over ``n_text`` and ``n_audio`` [K].

    These count the labels of a global batch. Cross-entropies summed over rows, times these and
    divided by ``rows``, are the mean over text plus the mean over codebooks of their means.
    """
    n = np.concatenate([[n_text], n_audio]).astype(np.float64)
    n_used = max(int(np.count_nonzero(n_audio)), 1)  # codebooks that have a label
    share = np.array([1.0, *[1 / n_used] * len(n_audio)])
    return np.where(n > 0, rows * share / np.maximum(n, 1), 0).astype(np.float32)
