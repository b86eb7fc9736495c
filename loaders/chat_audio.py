"""Conversations with sound, from a manifest, in batches of a few shapes.

`loaders.chatml` says what a manifest holds and how a sample becomes tokens, columns of codes and labels. The tokenizer is a
tokenizer.json of Hugging Face whose vocabulary has the special tokens `chatml.SPECIAL`. Codes of a recording come from

    codec = "codec.npz"          the project's own (loaders/codec.py, `jaxtrain train-codec`)
    codec = "module:function"    any function (wave float32 [n], rate) -> codes [K, T]
    codes = "codes.npz"          made elsewhere, by the manifest's names: .npz, Arrow or Parquet (`codec.read_many`)

With a codec every recording is read and decoded once in its life (by the Rust crate), and its codes are kept beside it, as
clip.wav.<codec>.npy, or in ``cache``. `jaxtrain encode-audio` does that ahead; else the first process of a run does, and the
others wait. A part of a recording (offset, duration) is cut from its codes.

Rows of a batch have one of a few shapes (S text tokens, A columns, N and M labels): the buckets into which the samples' lengths
fall with the least padding. Which bucket a batch is of is dealt by the buckets' shares (`loaders.mixture`); each goes through
its own samples in permuted order, every sample once before any comes again. All is a function of (seed, position, row). "test"
goes once through its samples, bucket by bucket.

A sample that cannot be used (no conversation, sound that is missing or broken, no codes, longer than ``longest``) is left out
of all that follows, told by its number, and counts against ``bad_budget``.
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

from loaders import chatml, checks, machine, mixture, order
from loaders import codec as codec_lib
from loaders.base import DataError, Facts, Field, HostBatch, Rows

VERSION = 1  # changes whenever the same (seed, position, row) would give another sample
ROUND = 8  # numbers of places and labels are multiples of it
CUTS = 256  # lengths at which a bucket may end

log = logging.getLogger("jaxtrain")


@dataclass(frozen=True)
class Config(checks.DataSection):
    manifest: str = ""  # [path] JSON list of samples
    test: str = ""  # [path] manifest to test on; empty = a share of the first
    test_share: float = 0.05  # [share] of the samples kept for testing where no path holds any, chosen by number
    tokenizer: str = ""  # [path] tokenizer.json with the special tokens
    audio_root: str = ""  # [path] folder that recordings' paths are relative to; empty = each manifest's own
    codec: str = ""  # [path or module:function] codec.npz, or a function of one's own; empty = all codes are in ``codes``
    codes: str = ""  # [path] codes made elsewhere: .npz, .arrow or .parquet; empty = the codec makes them
    cache: str = ""  # [path] folder for the codec's codes; empty = beside the recordings
    codebooks: int = 8  # [codebooks] of codes that do not come from a codec.npz
    codebook_size: int = 1024  # [codes] of each of them
    frame_rate: float = 25.0  # [1/s] of them
    delay: bool = True  # [bool] codebook k of a recording is delayed by k columns
    buckets: int = 4  # [shapes] of a batch, at most; each is a program that is compiled
    longest: int = 4096  # [places] of a sample; longer ones are left out
    bad_budget: float = 0.01  # [share] of the samples that may be unusable before the run stops
    threads: int = 0  # [threads] that encode recordings; 0 = one for each core this process may use

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("manifest", "tokenizer"):
            if not getattr(self, name):
                yield name, "is empty; name a file"
        for name in ("manifest", "test", "tokenizer", "codes"):
            path = getattr(self, name)
            if path and not pathlib.Path(path).expanduser().is_file():
                yield name, f"is {path!r}, which is no file"
        if not self.codec and not self.codes:
            yield (
                "codec",
                "is empty, and so is codes; name a codec.npz (`jaxtrain train-codec`), module:function, or a file of codes",
            )
        if self.codec:
            try:
                open_codec(self)
            except DataError as error:
                yield "codec", str(error)
        if self.audio_root and not pathlib.Path(self.audio_root).expanduser().is_dir():
            yield "audio_root", f"is {self.audio_root!r}, which is no folder"
        yield from checks.at_least(self, 1, "codebooks", "codebook_size", "buckets", "longest")
        yield from checks.not_negative(self, "threads")
        yield from checks.positive(self, "frame_rate")
        yield from checks.within(self, "[0, 1]", "test_share", "bad_budget")


class Shape(NamedTuple):
    """Of a row."""

    text: int  # S
    audio: int  # A
    text_labels: int  # N
    audio_labels: int  # M

    @property
    def places(self) -> int:
        return self.text + self.audio


class Sample(NamedTuple):
    """A usable one, recordings not yet in place."""

    number: int  # in its manifest
    tokens: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]
    clips: tuple[chatml.Clip, ...]
    size: Shape  # what it needs
    n_audio: int  # labels of one codebook


class Split(NamedTuple):
    samples: tuple[Sample, ...]
    shapes: tuple[Shape, ...]  # of the buckets, short to long
    members: tuple[np.ndarray, ...]  # int64: which samples are in each
    bad: tuple[tuple[int, str], ...]  # (number, reason)

    def fill(self, shape: Shape, members: np.ndarray) -> float:
        """Share of a bucket's places that are not padding."""
        used = sum(self.samples[i].size.places for i in members)
        return used / max(shape.places * len(members), 1)


class Chat:
    """A `loaders.base.Loader` of several shapes. Fields: those of `jaxtrain.workloads.audio_language`, and

    index, epoch  int32 [r]    the sample's number in its manifest (-1 in padding), passes through its bucket before
    weight        float32 [r]  0 for the padding of a bucket's ragged last batch, in "test"
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config, self._rows, self._seed, self._train = config, rows, seed, split == "train"
        self._data = _splits(config)[split]
        self._tools = tools_of(config, config.test if split == "test" and config.test else config.manifest)
        self.shapes = [_fields(self._tools, shape) for shape in self._data.shapes]
        self.fields = self.shapes[-1]
        sizes = [len(m) for m in self._data.members]
        self._batches = [-(-n // rows.batch) for n in sizes]  # of a pass, by bucket
        self.n_batches = sum(self._batches)
        if self._train and not self.n_batches:
            raise DataError(f"{config.manifest} leaves no samples to train on")
        self._mixture = mixture.Mixture(sizes, seed=seed) if self._train else None
        self._counts = np.array([[s.size.text_labels, s.n_audio] for s in self._data.samples]).reshape(-1, 2)
        self._dealt = functools.lru_cache(maxsize=1024)(self._deal)
        self._used = np.zeros(2, np.int64)  # places filled, and there
        self._position, self._closed = 0, False
        for i, (shape, members) in enumerate(zip(self._data.shapes, self._data.members, strict=True)):
            log.info(
                "%s bucket %d of %d: %d places (%d of text, %d of sound), %d samples, %.0f %% full",
                split, i + 1, len(sizes), shape.places, shape.text, shape.audio, len(members),
                100 * self._data.fill(shape, members),
            )  # fmt: skip

    def __iter__(self) -> "Chat":
        return self

    def __next__(self) -> tuple[int, HostBatch]:
        if self._closed or (not self._train and self._position >= self.n_batches):
            raise StopIteration
        bucket, number, sample = self._dealt(self._position)
        there = sample >= 0
        n_text, n_audio = self._counts[sample[there]].sum(0)
        scale = chatml.label_scale(n_text, np.full(self._tools.codebooks, n_audio), self._rows.batch)
        parts = [self._part(bucket, number[a:b], sample[a:b], scale) for a, b in self._rows.ranges]
        self._position += 1
        return self._position, {name: [part[name] for part in parts] for name in self.fields}

    def seek(self, position: int) -> None:
        self._position = position

    def shape_at(self, position: int) -> int:
        """Which of ``shapes`` batch number ``position`` has."""
        return self._dealt(position)[0]

    def state(self, position: int) -> dict[str, Any]:
        c = self._config
        how = {
            "version": [VERSION, mixture.VERSION, order.VERSION],
            "batch": self._rows.batch,
            "delay": c.delay,
            "buckets": [list(shape) for shape in self._data.shapes],
        }
        return {"position": position, "seed": self._seed, "fingerprint": _fingerprint(self._data), "order": how}

    def diagnostics(self) -> dict[str, Any]:
        """Buckets: shape, samples, fill. ``fill`` of what this process has read; samples that cannot be used, with why."""
        data = self._data
        buckets = [
            {**shape._asdict(), "samples": len(m), "fill": data.fill(shape, m)}
            for shape, m in zip(data.shapes, data.members, strict=True)
        ]
        return {"buckets": buckets, "fill": self._used[0] / max(self._used[1], 1), "bad": len(data.bad), "bad_list": data.bad}

    def close(self) -> None:
        self._closed = True

    def _deal(self, position: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Of a global batch: its bucket, each row's number in that bucket's order, and the samples (-1 for padding)."""
        row = np.arange(self._rows.batch)
        if self._mixture is None:
            # In an order of its own, so that the first batches of a short evaluation are of all buckets.
            position = int(order.permutation(0, 0, self.n_batches, np.array([position]))[0])
            bucket = int(np.searchsorted(np.cumsum(self._batches), position, side="right"))
            number = (position - sum(self._batches[:bucket])) * len(row) + row
            members = self._data.members[bucket]
            return bucket, number, np.where(number < len(members), members[np.minimum(number, len(members) - 1)], -1)
        of, before = self._mixture(np.array([position]))
        bucket, number = int(of[0]), int(before[0]) * len(row) + row
        members = self._data.members[bucket]
        epoch, place = np.divmod(number, len(members))
        sample = np.empty_like(number)
        for e in np.unique(epoch):
            at = epoch == e
            sample[at] = members[order.permutation(self._seed + (bucket << 32), int(e), len(members), place[at])]
        return bucket, number, sample

    def _part(self, bucket: int, number: np.ndarray, sample: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
        shape, n = self._data.shapes[bucket], len(sample)
        batch = {name: np.zeros((n, *field.shape), field.dtype) for name, field in self.shapes[bucket].items()}
        blank = chatml.row(self._tools.blank(), shape, self._tools.pad)
        for i, (at, k) in enumerate(zip(number.tolist(), sample.tolist(), strict=True)):
            one = blank
            if k >= 0:
                found = self._data.samples[k]
                one = chatml.row(self._tools.laid_out(found), shape, self._tools.pad)
                batch["weight"][i], batch["epoch"][i] = 1, at // len(self._data.members[bucket])
                self._used += found.size.places, shape.places
            for name, x in one.items():
                batch[name][i] = x
            batch["index"][i] = found.number if k >= 0 else -1
        batch["label_scale"][:] = scale
        return batch


class Tools(NamedTuple):
    """What turns samples into rows."""

    encode: Callable[[str], Sequence[int]]
    ids: Mapping[str, int]  # of the special tokens
    vocab: int
    codebooks: int
    size: int
    frame_rate: float
    delay: bool
    find: Callable[[chatml.Clip], np.ndarray]  # codes of a whole recording; raises ValueError or OSError

    @property
    def pad(self) -> int:
        return self.ids[chatml.END_OF_TURN]

    def codes(self, clip: chatml.Clip) -> np.ndarray:
        """int16 [K, T] of a part of a recording. Raises SampleError."""
        try:
            codes = self.find(clip)
        except (ValueError, OSError) as error:
            raise chatml.SampleError(f"{clip.url or 'raw_audio'}: {error}") from error
        if len(codes) != self.codebooks or (codes.size and not 0 <= codes.min() <= codes.max() < self.size):
            raise chatml.SampleError(
                f"{clip.url or 'raw_audio'}: its codes are {list(codes.shape)}, up to {codes.max(initial=0)}; {self.codebooks} "
                f"codebooks of {self.size} are wanted"
            )
        start = round(clip.offset * self.frame_rate)
        stop = codes.shape[1] if clip.duration is None else start + max(round(clip.duration * self.frame_rate), 1)
        if start >= codes.shape[1]:
            raise chatml.SampleError(f"{clip.url or 'raw_audio'}: offset {clip.offset} s is behind its end")
        return codes[:, start:stop]

    def expand(self, tokens: np.ndarray, labels: np.ndarray, codes: Sequence[np.ndarray]) -> chatml.Laid:
        return chatml.expand(
            tokens, labels, codes, audio_in=self.ids[chatml.AUDIO], audio_out=self.ids[chatml.AUDIO_OUT], size=self.size,
            codebooks=self.codebooks, delay=self.delay,
        )  # fmt: skip

    def laid_out(self, sample: Sample) -> chatml.Laid:
        try:
            return self.expand(sample.tokens, sample.labels, [self.codes(clip) for clip in sample.clips])
        except chatml.SampleError as error:  # they were there when the run began
            raise DataError(f"sample {sample.number} cannot be read any more: {error}") from error

    def blank(self) -> chatml.Laid:
        return self.expand(np.zeros(0, np.int32), np.zeros(0, np.int32), [])

    def check(self, number: int, sample: Any) -> Sample:
        """A sample of the manifest, tokenised and measured. Raises SampleError."""
        tokens, labels, clips = chatml.tokenise(chatml.render(sample), self.encode)
        laid = self.expand(tokens, labels, [self.codes(clip) for clip in clips])
        t = chatml.targets(laid)
        audio = int((laid.recording >= 0).sum())
        size = Shape(len(laid.tokens) - audio, audio, len(t.text), len(t.audio))
        if not len(t.text) and not len(t.audio):
            raise chatml.SampleError("it has nothing to learn: no assistant's turn from start_index on")
        return Sample(number, tokens, labels, tuple(clips), size, int((t.audio[:, 0] != chatml.NONE).sum()))


def fields(config: Config) -> dict[str, Field]:
    """Field -> shape of one row, dtype; of the longest bucket."""
    return _fields(tools_of(config, config.manifest), _splits(config)["train"].shapes[-1])


def facts(config: Config) -> Facts:
    """vocab, codebooks, codebook_size, context (places of the longest bucket), n_train, n_test, n_bad, and buckets of the
    training split: (S, A, N, M, share of the batches) of each."""
    tools, splits = tools_of(config, config.manifest), _splits(config)
    train = splits["train"]
    sizes = [len(m) for m in train.members]
    return {
        "vocab": tools.vocab,
        "codebooks": tools.codebooks,
        "codebook_size": tools.size,
        "context": max(shape.places for shape in train.shapes),
        "buckets": tuple((*shape, n / sum(sizes)) for shape, n in zip(train.shapes, sizes, strict=True)),
        "n_train": len(train.samples),
        "n_test": len(splits["test"].samples),
        "n_bad": len(train.bad),
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Chat:
    """A loader of ``split``, "train" or "test". Raises DataError: nothing to train on, too much that cannot be used."""
    return Chat(config, split=split, rows=rows, seed=seed)


def open_codec(config: Config) -> codec_lib.Codec:
    """Raises DataError."""
    return codec_lib.open_codec(
        config.codec, codebooks=config.codebooks, size=config.codebook_size, frame_rate=config.frame_rate
    )


def source_of(clip: chatml.Clip, root: pathlib.Path) -> codec_lib.Source:
    return codec_lib.Source(root / clip.url) if clip.url else codec_lib.Source(None, clip.raw)


def root_of(config: Config, manifest: str) -> pathlib.Path:
    return pathlib.Path(config.audio_root or pathlib.Path(manifest).expanduser().parent).expanduser()


def encode_all(config: Config, manifest: str) -> tuple[int, list[tuple[str, str]]]:
    """Makes the codes of a manifest's recordings that are not kept yet: how many, and (recording, reason) of those that fail.

    One process does it at a time; what another has made is not made again. Raises DataError where codes cannot be kept.
    """
    codec, root = open_codec(config), root_of(config, manifest)
    sources: dict[str, codec_lib.Source] = {}
    for sample in chatml.read_manifest(manifest):
        try:
            clips = [piece.clip for piece in chatml.render(sample) if piece.clip is not None]
        except chatml.SampleError:  # told of when the samples are checked
            continue
        for clip in clips:
            source = source_of(clip, root)
            sources[str(source.codes(codec, config.cache))] = source

    def missing() -> list[codec_lib.Source]:
        return [source for path, source in sources.items() if not source.is_kept(pathlib.Path(path))]

    if not missing():
        return 0, []
    done, bad = 0, []
    with codec_lib.only_one([pathlib.Path(config.cache).expanduser() if config.cache else root, machine.cache_folder("codes")]):
        todo = missing()
        if todo:
            log.info("encoding %d recordings of %s with %s", len(todo), manifest, codec.name)
        with concurrent.futures.ThreadPoolExecutor(config.threads or machine.cores()) as pool:
            jobs = {pool.submit(codec_lib.encode, source, codec, config.cache): source for source in todo}
            for job in concurrent.futures.as_completed(jobs):
                error = job.exception()
                if isinstance(error, DataError) or not isinstance(error, None | ValueError | OSError):
                    raise error
                bad += [(str(jobs[job]), str(error))] if error else []
                done += not error
    return done, sorted(bad)


def _fields(tools: Tools, shape: Shape) -> dict[str, Field]:
    integers = {
        "text": (shape.text,),
        "codes": (shape.audio, tools.codebooks),
        "place": (shape.places,),
        "slot": (shape.places,),
        "text_at": (shape.text_labels,),
        "text_target": (shape.text_labels,),
        "audio_at": (shape.audio_labels,),
        "audio_target": (shape.audio_labels, tools.codebooks),
        "index": (),
        "epoch": (),
    }
    return {
        **{name: Field(s, np.dtype(np.int32)) for name, s in integers.items()},
        "label_scale": Field((1 + tools.codebooks,), np.dtype(np.float32)),
        "weight": Field((), np.dtype(np.float32)),
    }


def _fingerprint(split: Split) -> str:
    digest = hashlib.sha256()
    for sample in split.samples:
        digest.update(sample.tokens.tobytes() + sample.labels.tobytes() + repr((sample.number, sample.size)).encode())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def tools_of(config: Config, manifest: str) -> Tools:
    path = pathlib.Path(config.tokenizer).expanduser()
    tokenizer = read_tokenizer(str(path))
    ids = {token: tokenizer.token_to_id(token) for token in chatml.SPECIAL}
    if missing := [token for token, i in ids.items() if i is None]:
        raise DataError(f"data.tokenizer: {path} has no token {', '.join(missing)}; add them as special tokens")
    root = root_of(config, manifest)
    if config.codes:
        table = _read_many(config.codes)
        codebooks, size, frame_rate = config.codebooks, config.codebook_size, config.frame_rate

        def find(clip: chatml.Clip) -> np.ndarray:
            if clip.url not in table:
                raise ValueError(f"{config.codes} has no codes of it")
            return table[clip.url]

    else:
        codec = open_codec(config)
        codebooks, size, frame_rate = codec.codebooks, codec.size, codec.frame_rate

        def find(clip: chatml.Clip) -> np.ndarray:
            source = source_of(clip, root)
            return codec_lib.read(source.codes(codec, config.cache))

    return Tools(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        ids=ids,
        vocab=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        codebooks=codebooks,
        size=size,
        frame_rate=frame_rate,
        delay=config.delay,
        find=find,
    )


_read_many = functools.lru_cache(maxsize=2)(codec_lib.read_many)


@functools.lru_cache(maxsize=2)
def read_tokenizer(path: str) -> Any:
    try:
        import tokenizers

        return tokenizers.Tokenizer.from_file(path)
    except ImportError as error:
        raise DataError("data.tokenizer needs the package tokenizers: pip install 'jaxtrain[language]'") from error
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(f"data.tokenizer: {path} cannot be read as a tokenizer.json: {error}") from error


@functools.lru_cache(maxsize=2)
def _splits(config: Config) -> dict[str, Split]:
    """Both splits. Facts and two loaders ask for them: they are made once in a process."""
    for field, text in config.problems():
        raise DataError(f"data.{field} {text}")
    samples, bad = _read(config, config.manifest)
    if config.test:
        test, test_bad = _read(config, config.test)
    else:
        held = order.held_out(np.array([s.number for s in samples], np.int64), config.test_share)
        test, test_bad = [s for s, h in zip(samples, held, strict=True) if h], []
        samples = [s for s, h in zip(samples, held, strict=True) if not h]
    if not samples:
        raise DataError(f"{config.manifest} leaves no samples to train on" + (f"; {bad[0][1]}" if bad else ""))
    return {"train": _bucketed(samples, bad, config.buckets), "test": _bucketed(test, test_bad, config.buckets)}


def _read(config: Config, manifest: str) -> tuple[list[Sample], list[tuple[int, str]]]:
    """Usable samples, and (number, reason) of the others. Raises DataError when those are too many."""
    if not config.codes:
        encode_all(config, manifest)
    tools, found, bad = tools_of(config, manifest), [], []
    everything = chatml.read_manifest(manifest)
    for number, sample in enumerate(everything):
        try:
            one = tools.check(number, sample)
            if one.size.places > config.longest:
                raise chatml.SampleError(f"it has {one.size.places} places, and data.longest is {config.longest}")
            found.append(one)
        except chatml.SampleError as error:
            bad.append((number, str(error)))
    for number, reason in bad[:20]:
        log.warning("%s: sample %d is left out: %s", manifest, number, reason)
    allowed = max(1, int(config.bad_budget * len(everything))) if config.bad_budget else 0
    if len(bad) > allowed:
        raise DataError(
            f"{manifest}: {len(bad)} of {len(everything)} samples cannot be used, and data.bad_budget={config.bad_budget} "
            f"allows {allowed}; the first is sample {bad[0][0]}: {bad[0][1]}"
        )
    if bad:
        log.warning(
            "%s: %d of %d samples are left out (data.bad_budget allows %d)", manifest, len(bad), len(everything), allowed
        )
    return found, bad


def _bucketed(samples: Sequence[Sample], bad: Sequence[tuple[int, str]], n: int) -> Split:
    sizes = np.array([s.size for s in samples], np.int64).reshape(-1, 4)
    groups = partition(sizes, n) if len(samples) else [np.zeros(0, np.int64)]
    shapes = [Shape(*(int(x) for x in _rounded(sizes[g].max(0, initial=1)))) for g in groups]
    return Split(tuple(samples), tuple(shapes), tuple(groups), tuple(bad))


def _rounded(x: np.ndarray) -> np.ndarray:
    return -(-np.maximum(x, 1) // ROUND) * ROUND


def partition(sizes: np.ndarray, n: int) -> list[np.ndarray]:
    """Rows of sizes [samples, 4] (`Shape`) in at most ``n`` groups, short to long, whose rows, each padded to its group's
    largest text and largest sound, have the fewest places: dynamic programming over the samples sorted by their places.
    """
    by_length = np.argsort(sizes[:, :2].sum(1), kind="stable")
    text, audio = sizes[by_length, 0], sizes[by_length, 1]
    cuts = np.unique(np.linspace(0, len(sizes), min(CUTS, len(sizes)) + 1).round().astype(int))
    most = [np.maximum.reduceat(x, cuts[:-1]) for x in (text, audio)]
    m = len(cuts) - 1
    cost = np.full((m + 1, m + 1), np.inf)  # of a group from cut i to cut j
    for i in range(m):
        places = sum(_rounded(np.maximum.accumulate(x[i:])) for x in most)
        cost[i, i + 1 :] = places * (cuts[i + 1 :] - cuts[i])
    best, came = cost[0].copy(), np.zeros((n, m + 1), int)
    for k in range(1, n):
        ways = best[:, None] + cost
        came[k] = ways.argmin(0)
        better = ways.min(0)
        came[k] = np.where(better < best, came[k], -1)  # -1: fewer groups do
        best = np.minimum(best, better)
    ends, j = [m], m
    for k in range(n - 1, 0, -1):
        if came[k][j] >= 0:
            j = int(came[k][j])
            ends.append(j)
    edges = [0, *cuts[sorted(set(ends) - {0})]]
    return [np.sort(by_length[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]
