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
from loaders.chat import chatml
from loaders.chat import codec as codec_lib
from loaders.io import checks, files, machine
from loaders.text.tokenizer import Tokenizer, open_tokenizer

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
                (
                    "is empty, and so is codes; name a codec.npz (`jaxtrain train-codec`),"
                    " module:function, or a file of codes"
                ),
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
        try:
            codes = self.find(clip)
        except (ValueError, OSError) as error:
            raise chatml.ExampleError(f"{clip.url or 'raw_audio'}: {error}") from error
        if len(codes) != self.codebooks or (
            codes.size and not 0 <= codes.min() <= codes.max() < self.size
        ):
            raise chatml.ExampleError(
                f"{clip.url or 'raw_audio'}: its codes are {list(codes.shape)}, up to"
                f" {codes.max(initial=0)}; expected {self.codebooks} codebooks of {self.size}"
            )
        start = round(clip.offset * self.frame_rate)
        stop = (
            codes.shape[1]
            if clip.duration is None
            else start + max(round(clip.duration * self.frame_rate), 1)
        )
        if start >= codes.shape[1]:
            raise chatml.ExampleError(
                f"{clip.url or 'raw_audio'}: offset {clip.offset} s is past its end"
            )
        return codes[:, start:stop]

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
            return self.expand(
                example.tokens, example.labels, [self.codes(clip) for clip in example.clips]
            )
        except chatml.ExampleError as error:  # it could be read when the run began
            raise DataError(f"example {example.number} can no longer be read: {error}") from error

    def blank(self) -> chatml.Laid:
        return self.expand(np.zeros(0, np.int32), np.zeros(0, np.int32), [])

    def check(self, number: int, example: Any) -> Example:
        """Tokenises and measures an example of the manifest. Raises ExampleError."""
        tokens, labels, clips = chatml.tokenise(chatml.render(example), self.encode)
        laid = self.expand(tokens, labels, [self.codes(clip) for clip in clips])
        t = chatml.targets(laid)
        audio = int((laid.recording >= 0).sum())
        size = Shape(len(laid.tokens) - audio, audio, len(t.text), len(t.audio))
        if not len(t.text) and not len(t.audio):
            raise chatml.ExampleError(
                "it has no labels: there is no assistant's turn from start_index on"
            )
        codes = hashlib.sha256(laid.codes.tobytes()).hexdigest()[:16]
        return Example(
            number,
            tokens,
            labels,
            tuple(clips),
            size,
            int((t.audio[:, 0] != chatml.NONE).sum()),
            codes,
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
    codec, root = open_codec(config), root_of(config, manifest)
    sources: dict[str, codec_lib.Source] = {}
    bad: list[tuple[str, str]] = []
    for example in chatml.read_manifest(manifest):
        try:
            clips = [piece.clip for piece in chatml.render(example) if piece.clip is not None]
        except chatml.ExampleError:  # reported when the examples are checked
            continue
        for clip in clips:
            try:
                source = source_of(clip, root, links=config.follow_links)
            except files.FileError as refused:
                bad.append((clip.url, str(refused)))
                continue
            sources[str(source.codes(codec, config.cache))] = source

    def missing() -> list[codec_lib.Source]:
        return [
            source for path, source in sources.items() if not source.is_kept(pathlib.Path(path))
        ]

    if not missing():
        return 0, len(sources), sorted(bad)
    done = 0
    with codec_lib.only_one(
        [files.expanded(config.cache) if config.cache else root, machine.cache_folder("codes")]
    ):
        todo = missing()
        if todo:
            log.info("encoding %d recordings of %s with %s", len(todo), manifest, codec.name)
        with concurrent.futures.ThreadPoolExecutor(config.threads or machine.cores()) as pool:
            jobs = {
                pool.submit(codec_lib.encode, source, codec, config.cache): source
                for source in todo
            }
            for job in concurrent.futures.as_completed(jobs):
                error = job.exception()
                if not isinstance(error, None | ValueError | OSError):
                    raise error
                # no place for codes
                if isinstance(error, DataError) and not isinstance(error, files.FileError):
                    raise error
                bad += [(str(jobs[job]), str(error))] if error else []
                done += not error
    return done, len(sources) - len(todo), sorted(bad)


def stamps(config: Config) -> files.Stamps:
    """Tell the files that a config names from later ones."""
    names = (config.manifest, config.test, config.tokenizer, config.codec, config.codes)
    return files.stamps(name for name in names if name)


def tools_of(config: Config, manifest: str) -> Tools:
    """Return tokenizer and codes of a config, for one of its manifests. Raises DataError."""
    return _tools_once(config, manifest, stamps(config))


@functools.lru_cache(maxsize=4)
def _tools_once(config: Config, manifest: str, made: files.Stamps) -> Tools:
    try:
        tokenizer = open_tokenizer(config.tokenizer)
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error
    ids = {token: i for token in chatml.SPECIAL if (i := tokenizer.id_of(token)) is not None}
    if missing := [token for token in chatml.SPECIAL if token not in ids]:
        raise DataError(
            f"data.tokenizer: {tokenizer.path} has no token {', '.join(missing)}; add them as"
            " special tokens"
        )
    root = root_of(config, manifest)
    if config.codes:
        table = _codes_once(config.codes, made)
        codebooks, size, frame_rate = config.codebooks, config.codebook_size, config.frame_rate

        def find(clip: chatml.Clip) -> np.ndarray:
            if clip.url not in table:
                raise ValueError(f"{config.codes} has no codes for it")
            return table[clip.url]

    else:
        codec = open_codec(config)
        codebooks, size, frame_rate = codec.codebooks, codec.size, codec.frame_rate

        def find(clip: chatml.Clip) -> np.ndarray:
            source = source_of(clip, root, links=config.follow_links)
            return codec_lib.read(source.codes(codec, config.cache))

    return Tools(
        tokenizer=tokenizer,
        ids=ids,
        codebooks=codebooks,
        size=size,
        frame_rate=frame_rate,
        delay=config.delay,
        find=find,
    )


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
    everything = chatml.read_manifest(manifest)
    for number, example in enumerate(everything):
        try:
            checked = tools.check(number, example)
            if checked.size.places > config.longest:
                raise chatml.ExampleError(
                    f"it has {checked.size.places} places, but data.longest is {config.longest}"
                )
            usable.append(checked)
        except chatml.ExampleError as error:
            bad.append((number, str(error)))
    for number, reason in bad[:20]:
        log.warning("%s: example %d is left out: %s", manifest, number, reason)
    allowed = max(1, int(config.bad_budget * len(everything))) if config.bad_budget else 0
    if len(bad) > allowed:
        raise DataError(
            f"{manifest}: {len(bad)} of {len(everything)} examples cannot be used, but"
            f" data.bad_budget={config.bad_budget} allows {allowed}; the first is example"
            f" {bad[0][0]}: {bad[0][1]}"
        )
    if bad:
        log.warning(
            "%s: %d of %d examples are left out (data.bad_budget allows %d)",
            manifest,
            len(bad),
            len(everything),
            allowed,
        )
    return usable, bad
