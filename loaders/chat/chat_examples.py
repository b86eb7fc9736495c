"""The examples of a manifest for `loaders.chat.chat_audio`: tokenised, measured, as codes.

Codes are of their recordings. The tokenizer is a tokenizer.json of Hugging Face whose vocabulary
has the special tokens `chatml.SPECIAL`. The codes of a recording come from

    codec = "codec.npz"          the project's own (loaders/chat/codec.py, `jaxtrain train-codec`)
    codec = "module:function"    any function (wave float32 [n], rate) -> codes [K, T]
    codes = "codes.npz"          made elsewhere, by the manifest's names: .npz, Arrow or Parquet
                                 (`codec.read_many`)

With a codec every recording is read and decoded only once (by the Rust crate), and its codes are
kept next to it, as clip.wav.<codec>.npy, or in ``cache``. `jaxtrain encode-audio` does that in
advance. If not, the first process of a run does, and the others wait. A part of a recording
(offset, duration) is cut from its codes.
"""

import concurrent.futures
import functools
import hashlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loaders.base import DataError
from loaders.buckets import Shape
from loaders.chat import chatml, code_stamp
from loaders.chat import codec as codec_lib
from loaders.chat.code_stamp import Kept
from loaders.io import checks, files, machine
from loaders.text.tokenizer import Tokenizer, open_tokenizer

MAX_REPORTED = 20  # examples that are left out, in the log

log = logging.getLogger("jaxtrain")


@dataclass(frozen=True)
class Config(checks.DataSection):
    # Free: the fingerprint and the order have them, or they change no number.
    on_resume = checks.OnResume(
        checks.FREE,
        function=("codebooks", "codebook_size", "frame_rate", "delay"),
        files=("tokenizer", "codec", "codes"),
    )

    manifest: str = ""  # [path] JSON list of examples
    test: str = ""  # [path] manifest to test on; empty = a share of the first
    # [share] share of the examples that is held out if test is empty, chosen by number
    test_share: float = 0.05
    tokenizer: str = ""  # [path] path of a tokenizer.json with the special tokens
    # [path] folder that recordings' paths are relative to; empty = each manifest's own
    audio_root: str = ""
    # [path or module:function] path of a codec.npz, or your own function; empty = all codes are in
    # ``codes``
    codec: str = ""
    # [path] codes made elsewhere: .npz, .arrow or .parquet; empty = the codec makes them
    codes: str = ""
    cache: str = ""  # [path] folder for the codec's codes; empty = next to the recordings
    codebooks: int = 8  # [codebooks] number of codebooks of codes that do not come from a codec.npz
    codebook_size: int = 1024  # [codes] number of codes of each codebook
    frame_rate: float = 25.0  # [1/s] columns of codes per second
    delay: bool = True  # [bool] codebook k of a recording is delayed by k columns
    buckets: int = 4  # [shapes] largest number of shapes of batches. A program is compiled for each
    longest: int = 4096  # [places] largest length of an example. Longer ones are left out
    # [share] share of the examples that may be unusable before the run stops
    bad_budget: float = 0.01
    follow_links: bool = False  # [bool] links in the folder of recordings may lead out of it
    # [threads] number of threads that encode recordings; 0 = one for each core this process may use
    threads: int = 0

    def validate(self) -> Iterator[tuple[str, str]]:
        for name in ("manifest", "tokenizer"):
            if not getattr(self, name):
                yield name, "is empty; name a file"
        for name in ("manifest", "test", "tokenizer", "codes"):
            path = getattr(self, name)
            if path and not files.expanded(path).is_file():
                yield name, f"is {path!r}, which is not a file"
        if not self.codec and not self.codes:
            yield (
                "codec",
                "is empty, and so is codes; name a codec.npz (`jaxtrain train-codec`),"
                " module:function, or a file of codes",
            )
        if self.codec:
            try:
                open_codec(self)
            except DataError as error:
                yield "codec", str(error)
        if self.audio_root and not files.expanded(self.audio_root).is_dir():
            yield "audio_root", f"is {self.audio_root!r}, which is not a folder"
        yield from checks.at_least(self, 1, "codebooks", "codebook_size", "buckets", "longest")
        yield from checks.threads(self, least=0)
        yield from checks.positive(self, "frame_rate")
        yield from checks.within(self, "[0, 1]", "test_share", "bad_budget")


class Example(NamedTuple):
    """A usable example, before the codes of its recordings are put in."""

    number: int  # in its manifest
    tokens: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]
    clips: tuple[chatml.Clip, ...]
    size: Shape  # its needs
    n_audio: int  # labels of one codebook
    codes: str = ""  # a digest of the codes of its recordings


class Tools(NamedTuple):
    tokenizer: Tokenizer
    ids: Mapping[str, int]  # of the special tokens
    codebooks: int
    size: int
    frame_rate: float
    delay: bool
    # codes of a whole recording. Raises ValueError or OSError
    find: Callable[[chatml.Clip], np.ndarray]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode([text])[0]

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab

    @property
    def pad(self) -> int:
        """The token that fills spare places."""
        return self.ids[chatml.END_OF_TURN]

    def codes(self, clip: chatml.Clip) -> np.ndarray:
        """int16 [K, T] of a part of a recording. Raises ExampleError."""
        name = clip.url or "raw_audio"
        try:
            codes = self.find(clip)
        except (ValueError, OSError) as error:
            raise chatml.ExampleError(f"{name}: {error}") from error
        if not self._fits(codes):
            raise chatml.ExampleError(
                f"{name}: its codes are {list(codes.shape)}, up to {codes.max(initial=0)}; expected"
                f" {self.codebooks} codebooks of {self.size}"
            )
        n_times = codes.shape[1]
        start = round(clip.offset * self.frame_rate)
        stop = n_times
        if clip.duration is not None:
            n_of_part = round(clip.duration * self.frame_rate)
            stop = start + max(n_of_part, 1)
        if start >= n_times:
            raise chatml.ExampleError(f"{name}: offset {clip.offset} s is past its end")
        return codes[:, start:stop]

    def _fits(self, codes: np.ndarray) -> bool:
        """Whether codes [K, T] are of the codebooks, and in them."""
        if len(codes) != self.codebooks:
            return False
        if not codes.size:
            return True
        return bool(0 <= codes.min() and codes.max() < self.size)

    def expand(
        self, tokens: np.ndarray, labels: np.ndarray, codes: Sequence[np.ndarray]
    ) -> chatml.Laid:
        """`chatml.expand` with these tokens and codebooks. Raises ExampleError."""
        return chatml.expand(
            tokens,
            labels,
            codes,
            audio_in=self.ids[chatml.AUDIO],
            audio_out=self.ids[chatml.AUDIO_OUT],
            size=self.size,
            codebooks=self.codebooks,
            delay=self.delay,
        )

    def laid_out(self, example: Example) -> chatml.Laid:
        """Return an example with the codes of its recordings in place. Raises DataError."""
        try:
            codes = [self.codes(clip) for clip in example.clips]
            return self.expand(example.tokens, example.labels, codes)
        except chatml.ExampleError as error:  # it could be read when the run began
            raise DataError(f"example {example.number} can no longer be read: {error}") from error

    def blank(self) -> chatml.Laid:
        """Return an example without anything."""
        nothing = np.zeros(0, np.int32)
        return self.expand(nothing, nothing, [])

    def check(self, number: int, example: Any) -> Example:
        """Tokenises and measures an example of the manifest. Raises ExampleError."""
        pieces = chatml.render(example)
        tokens, labels, clips = chatml.tokenise(pieces, self.encode)
        codes = [self.codes(clip) for clip in clips]
        laid = self.expand(tokens, labels, codes)
        targets = chatml.targets(laid)
        n_text_labels = len(targets.text)
        n_audio_labels = len(targets.audio)
        if not n_text_labels and not n_audio_labels:
            raise chatml.ExampleError(
                "it has no labels: there is no assistant's turn from start_index on"
            )
        n_audio = int((laid.recording >= 0).sum())
        n_text = len(laid.tokens) - n_audio
        has_first_codebook = targets.audio[:, 0] != chatml.NONE
        digest = hashlib.sha256(laid.codes.tobytes()).hexdigest()
        return Example(
            number=number,
            tokens=tokens,
            labels=labels,
            clips=tuple(clips),
            size=Shape(n_text, n_audio, n_text_labels, n_audio_labels),
            n_audio=int(has_first_codebook.sum()),
            codes=digest[:16],
        )


def open_codec(config: Config) -> codec_lib.Codec:
    """Return the codec of a config. Raises DataError."""
    return codec_lib.open_codec(
        config.codec,
        codebooks=config.codebooks,
        size=config.codebook_size,
        frame_rate=config.frame_rate,
    )


def source_of(clip: chatml.Clip, root: pathlib.Path, *, links: bool = False) -> codec_lib.Source:
    """Return the recording of a clip: its content, or a file below ``root``. Raises FileError."""
    if not clip.url:
        return codec_lib.Source(None, clip.raw)
    remedy = f"; name the folder of the recordings as data.audio_root{files.LINKS}"
    return codec_lib.Source(files.inside(root, clip.url, links=links, remedy=remedy))


def root_of(config: Config, manifest: str) -> pathlib.Path:
    """Return the folder that the recordings' paths are relative to."""
    return files.expanded(config.audio_root or files.expanded(manifest).parent)


def encode_all(config: Config, manifest: str) -> tuple[int, int, list[tuple[str, str]]]:
    """Make the codes of a manifest's recordings that have none yet, one process at a time.

    Returns how many, how many were there already, and (recording, reason) of failures. Raises
    DataError if codes cannot be kept.
    """
    codec = open_codec(config)
    root = root_of(config, manifest)
    sources, failures = _sources(config, manifest, codec, root)
    if not _without_codes(sources):
        return 0, len(sources), sorted(failures)
    cache = files.expanded(config.cache) if config.cache else root
    with codec_lib.only_one([cache, machine.cache_folder("codes")]):
        missing = _without_codes(sources)
        if missing:
            log.info("encoding %d recordings of %s with %s", len(missing), manifest, codec.name)
        errors = _encode(config, codec, missing)
    failures += errors
    n_encoded = len(missing) - len(errors)
    return n_encoded, len(sources) - len(missing), sorted(failures)


def _sources(
    config: Config, manifest: str, codec: codec_lib.Codec, root: pathlib.Path
) -> tuple[dict[pathlib.Path, codec_lib.Source], list[tuple[str, str]]]:
    """Return a manifest's recordings by their files of codes, and (url, reason) of bad ones."""
    sources: dict[pathlib.Path, codec_lib.Source] = {}
    unusable: list[tuple[str, str]] = []
    for example in chatml.read_manifest(manifest):
        try:
            clips = chatml.clips_of(chatml.render(example))
        except chatml.ExampleError:  # reported when the examples are checked
            continue
        for clip in clips:
            try:
                source = source_of(clip, root, links=config.follow_links)
            except files.FileError as error:
                unusable.append((clip.url, str(error)))
                continue
            path = source.codes(codec, config.cache)
            sources[path] = source
    return sources, unusable


def _without_codes(sources: Mapping[pathlib.Path, codec_lib.Source]) -> list[codec_lib.Source]:
    """Return the recordings whose codes are not made yet, or were made of other recordings."""
    missing = {}
    unread = {}
    for path, source in sources.items():
        kept = source.kept(path)
        if kept is Kept.NO:
            missing[path] = source
        elif kept is Kept.UNREAD and source.path:
            unread[path] = source.path
    for path in unread.keys() - code_stamp.same_content(unread):
        missing[path] = sources[path]
    return [missing[path] for path in sources if path in missing]


def _encode(
    config: Config, codec: codec_lib.Codec, sources: Sequence[codec_lib.Source]
) -> list[tuple[str, str]]:
    """Make codes by several threads. Return (recording, reason) of failures."""
    failures: list[tuple[str, str]] = []
    n_threads = config.threads or machine.cores()
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        jobs = {}
        for source in sources:
            job = pool.submit(codec_lib.encode, source, codec, config.cache)
            jobs[job] = source
        for job in concurrent.futures.as_completed(jobs):
            error = job.exception()
            if error is None:
                continue
            if not isinstance(error, ValueError | OSError):
                raise error
            # no place for codes
            if isinstance(error, DataError) and not isinstance(error, files.FileError):
                raise error
            failures.append((str(jobs[job]), str(error)))
    return failures


def stamps(config: Config) -> files.Stamps:
    """Tell the files that a config names from later ones."""
    names = (config.manifest, config.test, config.tokenizer, config.codec, config.codes)
    return files.stamps(filter(None, names))


def tools_of(config: Config, manifest: str) -> Tools:
    """Return tokenizer and codes of a config, for one of its manifests. Raises DataError."""
    return _tools_once(config, manifest, stamps(config))


@functools.lru_cache(maxsize=4)
def _tools_once(config: Config, manifest: str, file_stamps: files.Stamps) -> Tools:
    try:
        tokenizer = open_tokenizer(config.tokenizer)
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error
    ids = _special_ids(tokenizer)
    if config.codes:
        return Tools(
            tokenizer=tokenizer,
            ids=ids,
            codebooks=config.codebooks,
            size=config.codebook_size,
            frame_rate=config.frame_rate,
            delay=config.delay,
            find=_find_in_table(config, file_stamps),
        )
    codec = open_codec(config)
    return Tools(
        tokenizer=tokenizer,
        ids=ids,
        codebooks=codec.codebooks,
        size=codec.size,
        frame_rate=codec.frame_rate,
        delay=config.delay,
        find=_find_in_files(config, manifest, codec),
    )


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens. Raises DataError if the vocabulary lacks some."""
    ids = {}
    missing = []
    for token in chatml.SPECIAL:
        token_id = tokenizer.id_of(token)
        if token_id is None:
            missing.append(token)
        else:
            ids[token] = token_id
    if missing:
        raise DataError(
            f"data.tokenizer: {tokenizer.path} has no token {', '.join(missing)}; add them as"
            " special tokens"
        )
    return ids


def _find_in_table(
    config: Config, file_stamps: files.Stamps
) -> Callable[[chatml.Clip], np.ndarray]:
    """Make `Tools.find` of codes that were made elsewhere."""
    table = _codes_once(config.codes, file_stamps)

    def find(clip: chatml.Clip) -> np.ndarray:
        if clip.url not in table:
            raise ValueError(f"{config.codes} has no codes for it")
        return table[clip.url]

    return find


def _find_in_files(
    config: Config, manifest: str, codec: codec_lib.Codec
) -> Callable[[chatml.Clip], np.ndarray]:
    """Make `Tools.find` of codes that `encode_all` keeps."""
    root = root_of(config, manifest)

    def find(clip: chatml.Clip) -> np.ndarray:
        source = source_of(clip, root, links=config.follow_links)
        path = source.codes(codec, config.cache)
        return codec_lib.read(path)

    return find


@functools.lru_cache(maxsize=2)
def _codes_once(path: str, _: files.Stamps) -> dict[str, np.ndarray]:
    return codec_lib.read_many(path)


def read_examples(config: Config, manifest: str) -> tuple[list[Example], list[tuple[int, str]]]:
    """Return usable examples, and (number, reason) of others. Raises DataError for too many."""
    if not config.codes:
        encode_all(config, manifest)
    tools = tools_of(config, manifest)
    usable: list[Example] = []
    bad: list[tuple[int, str]] = []
    records = chatml.read_manifest(manifest)
    for number, record in enumerate(records):
        try:
            example = tools.check(number, record)
            n_places = example.size.places
            if n_places > config.longest:
                raise chatml.ExampleError(
                    f"it has {n_places} places, but data.longest is {config.longest}"
                )
            usable.append(example)
        except chatml.ExampleError as error:
            bad.append((number, str(error)))
    _report_bad(config, manifest, bad, len(records))
    return usable, bad


def _report_bad(
    config: Config, manifest: str, bad: Sequence[tuple[int, str]], n_examples: int
) -> None:
    """Log the examples that are left out. Raises DataError for more than ``bad_budget``."""
    for number, reason in bad[:MAX_REPORTED]:
        log.warning("%s: example %d is left out: %s", manifest, number, reason)
    n_allowed = int(config.bad_budget * n_examples)
    if config.bad_budget:
        n_allowed = max(1, n_allowed)
    if len(bad) > n_allowed:
        number, reason = bad[0]
        raise DataError(
            f"{manifest}: {len(bad)} of {n_examples} examples cannot be used, but"
            f" data.bad_budget={config.bad_budget} allows {n_allowed}; the first is example"
            f" {number}: {reason}{checks.more(len(bad))}",
            listed=[f"{manifest}: example {number}: {reason}" for number, reason in bad],
        )
    if bad:
        log.warning(
            "%s: %d of %d examples are left out (data.bad_budget allows %d)",
            manifest,
            len(bad),
            n_examples,
            n_allowed,
        )
