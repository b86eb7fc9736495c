"""Rate, length, date and place of recordings, from their first and last bytes, kept."""

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from loaders import _rust
from loaders.audio.recordings import recorders
from loaders.audio.recordings.annotations import Errors
from loaders.io import files, machine

SAMPLE = 4096  # [bytes] at each of three places of a recording, by which copies are looked for
MAX_HASHED = 256 << 20  # [bytes] of a recording that is hashed whole, and the places of others
PLACES = 256
LOWEST, HIGHEST = 1_000, 768_000  # [Hz] a recording's rate
CHUNKS = 64  # that are looked at in a WAV's header
LARGEST = 1 << 16  # [bytes] of a header chunk that is read
WAMD_TIME_EXPANSION = 0x0F  # the number of a field
MAX_PEAK = (
    8.0  # of floats: the loudest sound of a recorder with float samples, 18 dB over full scale
)
PREPARED = b"jxtr"  # of the FLAC files of jaxtrain prepare, as in rust/decode/src/flac_write.rs
FULL_SCALES = (128, 32_768, 8_388_608, 2_147_483_648)  # of integers of 8, 16, 24 and 32 bits
MORE = (1 << 63) - 1  # frames that a file states which goes on for an unknown time


@dataclasses.dataclass(slots=True)
class Header:
    """The facts of one recording."""

    size: int  # [bytes]
    mtime: int  # [ns] of the last change, which may be later than the date of the file
    rate: int  # [Hz]
    frames: int
    channels: int
    slow: bool  # of a format that is decoded several times slower
    # frames that the header states, 0 if it leaves them open, MORE if the file then ends inside
    # some
    stated: int
    cancels: bool  # its two channels cancel each other: their mean is almost silence
    digest: str  # of a few bytes: equal for copies
    # date, time, latitude, longitude, site, of its header or its name; time_expansion of its
    # header, and the chunk that states it
    about: dict[str, str]
    peak: float = 0.0  # the largest of its samples if they are floats, at a few places
    # samples that are NaN, infinite or too large, of floats, which are all read; -1: nobody looked
    beyond: int = -1
    first_beyond: int = 0

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def read_all(
    paths: Iterable[str],
    known: Mapping[str, Header],
    errors: Errors,
    threads: int = 0,
    *,
    time_expansion: float | None = None,
    samples: bool = False,
) -> tuple[dict[str, Header], int]:
    """Return the headers of readable recordings, by path, and how many were not ``known``.

    ``samples``: whether to read all samples of floats, of which some may be no numbers.

    ``time_expansion``: times slower than life that the recordings are taken to be; None: nothing
    decides that yet.
    """
    paths = sorted(set(paths))
    headers: dict[str, Header] = {}
    n_read = 0

    def read(path: str) -> Header | tuple[str, str]:
        return _read(path, known.get(path), samples)

    with concurrent.futures.ThreadPoolExecutor(threads or machine.cores()) as pool:
        outcomes = pool.map(read, paths, chunksize=64)
        for path, outcome in zip(paths, outcomes, strict=True):
            if isinstance(outcome, tuple):
                errors.add(*outcome)
                continue
            n_read += outcome is not known.get(path)
            is_kept = _is_kept(path, outcome, errors)
            if is_kept and _has_its_speed(path, outcome, time_expansion, errors):
                headers[path] = outcome
                _note_other_time(path, outcome, errors)
    return headers, n_read


def _is_kept(path: str, header: Header, errors: Errors) -> bool:
    """Count what is odd about a recording. Return whether it is used all the same."""
    promised = f"its header states {header.stated / header.rate:.3f} s"
    if header.stated > header.frames:
        why = ", inside a page or frame" if header.stated == MORE else f"; {promised}"
        text = f"{path} ends after {header.seconds:.3f} s{why}"
        if not errors.add("truncated-file", text):
            return False
    elif 0 < header.stated < header.frames:
        text = f"{path} holds {header.seconds:.3f} s; {promised}"
        if not errors.add("stale-header", text):
            return False
    if header.peak > MAX_PEAK:
        full_scale = next((n for n in FULL_SCALES if header.peak <= n), FULL_SCALES[-1])
        text = (
            f"{path}: its samples are floats of up to {header.peak:g}; divide them by"
            f" {full_scale} if they were integers"
        )
        if not errors.add("float-range", text):
            return False
    if header.beyond > 0:
        text = (
            f"{path}: {header.beyond} of {header.frames} samples are NaN, infinite or beyond 1e12,"
            f" the first at {header.first_beyond / header.rate:.3f} s"
        )
        if not errors.add("not-finite", text):
            return False
    return not header.cancels or errors.add("opposite-channels", path)


def _has_its_speed(path: str, header: Header, time_expansion: float | None, errors: Errors) -> bool:
    """Count a header that states another slow-down. Return whether the recording is used."""
    stated = header.about.get("time_expansion", "")
    if not stated or float(stated) == (time_expansion or 1.0):
        return True
    text = f"{path}: its {header.about.get('time_expansion_of')} states the time expansion {stated}"
    if time_expansion is None:
        text += f"; train with --config.data.time_expansion={stated}"
    else:
        text += f", and it is read with {time_expansion:g}; say --time-expansion {stated}"
    return errors.add("time-expansion", text)


def _note_other_time(path: str, header: Header, errors: Errors) -> None:
    name = recorders.from_name(os.path.basename(path))
    if recorders.differ(name, header.about):
        stated, used = _time_text(name), _time_text(header.about)
        errors.add("other-time", f"{path}: its name states {stated}, its header {used}")


def _time_text(about: Mapping[str, str]) -> str:
    return "T".join(filter(None, (about.get("date"), about.get("time"))))


def _read(path: str, earlier: Header | None, samples: bool = False) -> Header | tuple[str, str]:
    try:
        path.encode()
    except UnicodeEncodeError:
        return "odd-name", f"{os.fsencode(path)!r}; rename it"
    try:
        stat = os.stat(path)
        if earlier and (earlier.size, earlier.mtime) == (stat.st_size, files.changed_ns(stat)):
            if earlier.beyond >= 0 or not samples:
                return earlier
        if stat.st_size == 0:
            return "empty-file", f"{path} has 0 bytes"
        rate, frames, channels, slow = _rust.recording_info(path)
        if not LOWEST <= rate <= HIGHEST:
            text = f"{path}: its sample rate is {rate} Hz; expected {LOWEST} to {HIGHEST}"
            return "unreadable-file", text
        stated, cancels = _rust.recording_doubts(path)
        peak = _rust.recording_peak(path)
        beyond, first_beyond = _rust.recording_beyond(path) if samples else (-1, 0)
        digest, about = _look(path, stat.st_size)
    except PermissionError:
        return "no-permission", f"{path}: permission denied"
    except FileNotFoundError:
        return "missing-file", f"{path} does not exist"
    except (OSError, ValueError) as error:
        return "unreadable-file", f"{path}: {error}"
    about = {**recorders.from_name(os.path.basename(path)), **about}
    return Header(
        size=stat.st_size,
        mtime=files.changed_ns(stat),
        rate=rate,
        frames=frames,
        channels=channels,
        slow=slow,
        stated=stated,
        cancels=cancels,
        digest=digest,
        about=about,
        peak=peak,
        beyond=beyond,
        first_beyond=first_beyond,
    )


def fault(path: str, start: float, end: float) -> str:
    """Why a part of a recording cannot be decoded [s], to end a message with, or "" if it can."""
    try:
        why = _rust.recording_fault(path, start, end)
    except (OSError, ValueError) as error:
        why = str(error)
    return f": {why}" if why else ""


def same_sound(headers: Mapping[str, Header], groups: Mapping[str, object]) -> list[list[str]]:
    """Group recordings with the same sound, whatever their bytes, each by name.

    ``groups``: of each recording. Samples at a few places are compared, of those of one length that
    are in several groups.
    """
    candidates: dict[tuple[int, int], list[str]] = defaultdict(list)
    for path, header in headers.items():
        candidates[header.rate, header.frames].append(path)
    by_sound: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
        for (rate, frames), paths in candidates.items():
            if len({groups[path] for path in paths}) == 1:
                continue
            for path, sound in zip(paths, pool.map(_sound, paths), strict=True):
                if sound is not None:
                    by_sound[rate, frames, sound].append(path)
    return sorted(sorted(paths) for paths in by_sound.values() if len(paths) > 1)


def _sound(path: str) -> int | None:
    try:
        return _rust.recording_sound(path)
    except (OSError, ValueError):
        return None


def same_bytes(headers: Mapping[str, Header]) -> list[list[str]]:
    """Group recordings with the same bytes, each by name. Only likely ones are read whole."""
    candidates: dict[tuple[int, str], list[str]] = defaultdict(list)
    for path, header in headers.items():
        candidates[header.size, header.digest].append(path)
    groups = []
    for paths in candidates.values():
        if len(paths) == 1:
            continue
        by_content: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            with open(path, "rb") as file:
                by_content[hashlib.file_digest(file, "blake2b").hexdigest()].append(path)
        groups += [sorted(copies) for copies in by_content.values() if len(copies) > 1]
    return sorted(groups)


def content_of(path: str) -> str:
    """Return a digest that copies of a recording share, of all its bytes or of many places.

    Raises OSError.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        if size <= MAX_HASHED:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for k in range(PLACES):
                file.seek((size - SAMPLE) * k // (PLACES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def content_by_samples(path: str) -> tuple[int, str]:
    """Return a file's size, and the digest that its header has in an index. Raises OSError."""
    size = os.path.getsize(path)
    return size, _look(path, size)[0]


def _look(path: str, size: int) -> tuple[str, dict[str, str]]:
    with open(path, "rb") as file:
        digest = hashlib.blake2b(digest_size=16)
        first = file.read(SAMPLE)
        digest.update(first)
        for at in (size // 2, max(0, size - SAMPLE)):
            file.seek(at)
            digest.update(file.read(SAMPLE))
        about: dict[str, str] = {}
        if first[:4] in (b"RIFF", b"RF64", b"BW64") and first[8:12] == b"WAVE":
            file.seek(12)
            about = _chunks(file, size)
        elif first[:4] == b"fLaC" and first[46:50] == PREPARED:
            rate, rate_of_life = struct.unpack(">II", first[50:58])
            about = _slow_down(f"{rate_of_life / max(rate, 1):g}", "header (jaxtrain prepare)")
    return digest.hexdigest(), about


def _chunks(file: BinaryIO, size: int) -> dict[str, str]:
    """Read the chunks of AudioMoth, GUANO and WAMD in a WAV whose first chunk is next."""
    long_size = 0  # of the data, by a chunk of files beyond 4 GiB
    about: dict[str, str] = {}
    for _ in range(CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        name = head[:4]
        (length,) = struct.unpack("<I", head[4:])
        if name == b"data":
            if long_size and length in (0, 0xFFFFFFFF):
                length = long_size
            if length > size - file.tell() or length == 0:
                break
        body = b""
        if name in (b"ds64", b"guan", b"wamd", b"LIST"):
            body = file.read(min(length, LARGEST))
        if name == b"ds64" and len(body) >= 16:
            (long_size,) = struct.unpack("<Q", body[8:16])
        elif name == b"guan":
            about |= from_guano(body.decode("utf-8", errors="replace"))
        elif name == b"wamd":
            about |= from_wamd(body)
        elif name == b"LIST":
            about |= from_audiomoth(body.replace(b"\0", b" ").decode("latin-1"))
        file.seek(length - len(body) + (length & 1), os.SEEK_CUR)
    return about


def from_guano(text: str) -> dict[str, str]:
    """Return date, place and slow-down of a GUANO chunk (https://guano-md.org).

    Its lines are "Timestamp: 2023-05-01T…", "Loc Position: 51.5 -0.1", "TE: 10".
    """
    fields = {}
    for line in files.lines(text):
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    about = recorders.stamp(fields.get("Timestamp", "").replace(" ", "T", 1))
    place = fields.get("Loc Position", "").split()
    if len(place) == 2:
        about |= recorders.place(*place)
    return about | _slow_down(fields.get("TE", ""), "GUANO header (TE)")


def _slow_down(text: str, header: str) -> dict[str, str]:
    """time_expansion of a header's number, and the header, or nothing if it is none."""
    if not re.fullmatch(r"\d{1,4}(\.\d{1,6})?", text) or float(text) == 0:
        return {}
    return {"time_expansion": f"{float(text):g}", "time_expansion_of": header}


def from_wamd(body: bytes) -> dict[str, str]:
    """Return the slow-down of a chunk of Wildlife Acoustics: fields of number, size and content."""
    at = 0
    while at + 6 <= len(body):
        number, size = struct.unpack_from("<HI", body, at)
        content = body[at + 6 : at + 6 + size]
        if number == WAMD_TIME_EXPANSION and len(content) == 2:
            return _slow_down(str(int.from_bytes(content, "little")), "WAMD header")
        at += 6 + size
    return {}


def from_audiomoth(text: str) -> dict[str, str]:
    """Date of an AudioMoth's comment: "Recorded at 19:17:30 23/06/2021 (UTC+1) by AudioMoth …"."""
    comment = re.search(
        r"Recorded at (\d\d:\d\d:\d\d)(?:\.\d+)? (\d\d)/(\d\d)/(\d{4}) \(UTC([+-]\d+(?::\d\d)?)?\)",
        text,
    )
    if not comment:
        return {}
    time, day, month, year, zone = comment.groups(default="+0")
    hours, _, minutes = zone[1:].partition(":")
    offset = f"{zone[0]}{int(hours):02d}:{minutes or '00'}"
    return recorders.stamp(f"{year}-{month}-{day}T{time}{offset}")
