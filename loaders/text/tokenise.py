"""Makes token files, which loaders.text.tokens reads, of text, JSONL, Parquet or Arrow.

Inputs are files, folders (all files below with a known ending that are not hidden; others are
counted) or globs. By their endings, in either case:

    .txt .md          a document each, or one for each paragraph (between blank lines) or line
    .jsonl .ndjson    a line is an object, one column of which is a document
    .parquet          a row is a document: one column of it, a row group at a time
    .arrow            the same, as an IPC stream or file (as Hugging Face ``datasets`` writes them)

A part of an input becomes a shard, in the order of the inputs. The files are the same bytes for any
number of workers. `make` resumes after the last complete shard of an interrupted call. Other inputs
or another tokenizer are an error. Called again with the same ones, it reports the finished folder.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loaders.io import atomic_write, columnar, machine
from loaders.io import files as files_lib
from loaders.io.checks import UserError, first_line
from loaders.text import conversations, token_files
from loaders.text import tokenizer as tokenizer_lib
from loaders.text.tokenizer import open_tokenizer

TEXT = (".txt", ".md")
LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
ARROW = (".arrow",)
ENDINGS = (*TEXT, *LINES, *PARQUET, *ARROW)
BATCH = 200  # texts that are in memory together: never all of a shard's
# [bytes] of a JSONL file in one shard: so few in small files that workers end together
PART, LEAST_PART = 32 << 20, 2 << 20
PARTS = 64  # of a file, before its parts become larger than the least
PIECE = 1 << 20  # [bytes] of a line that is passed over
LONGEST_LINE = 1 << 30  # [bytes] of a JSONL file, which are in memory together
SHOWN = 20  # rows without text that are printed
PARTIAL = ".parts"  # folder of the entries of finished shards
# file of a finished folder: the digest of its inputs and options, by which the same command
# recognises it
MADE_OF = "made_of"
LEASE = "lease.json"  # of the process that writes there


class TokensError(UserError, ValueError):
    """An error in the inputs or options. The message names the remedy."""


class Options(NamedTuple):
    tokenizer: str
    eos: str
    column: str
    documents: str
    specials: bool = True  # whether names of special tokens inside texts become these tokens


class Part(NamedTuple):
    """The input of one shard: a whole text, lines in a range of bytes, a row group, a batch."""

    path: str
    begin: int
    end: int


def make(
    out: pathlib.Path, inputs: Sequence[str], options: Options, *, workers: int = 1, skip: int = 0
) -> None:
    """Write the folder ``out``, without up to ``skip`` rows of no text. Raises TokensError."""
    if workers < 1:
        raise TokensError(f"--workers is {workers}; it must be at least 1")
    files = _files(inputs)
    encoder = _tokenizer(options)
    parts = [part for path in files for part in _parts(path)]
    companions: dict[str, bytes] = {}
    if options.tokenizer != "bytes":
        companions = tokenizer_lib.read_files(files_lib.expanded(options.tokenizer), links=True)
    plan = _digest(files, options, encoder.ends, companions)
    if (out / "tokens.json").exists() and not (out / PARTIAL).exists():
        _report_finished(out, plan)
        return
    marker = _begin(out, plan)
    _make_shards(out, parts, options, workers)
    entries = [json.loads(_entry(out, i).read_text()) for i in range(len(parts))]
    bad_rows = [line for entry in entries for line in entry["bad"]]
    _report_bad_rows(bad_rows, skip)
    for name, content in companions.items():
        (out / name).parent.mkdir(exist_ok=True)
        with atomic_write.file(out / name) as file:
            file.write(content)
    shards = [entry["shard"] for entry in entries]
    token_files.write_about(
        out,
        vocab=encoder.vocab,
        eos=encoder.eos,
        ends=encoder.ends,
        tokenizer=None if options.tokenizer == "bytes" else "tokenizer.json",
        shards=shards,
    )
    counts = _Counts()
    for entry in entries:
        counts += _Counts(**entry["counts"])
    _report_special_tokens(encoder, counts)
    for i in range(len(parts)):
        _entry(out, i).unlink()
    marker.rename(out / MADE_OF)
    (out / PARTIAL).rmdir()
    print(f"{out}: {_summary(shards)}; {len(bad_rows)} skipped")


def _report_finished(out: pathlib.Path, plan: str) -> None:
    """Print what a finished folder holds.

    Raises TokensError if it was made of other things, DataError if its shards have changed since.
    """
    made_of = out / MADE_OF
    if not made_of.exists() or made_of.read_text() != plan:
        raise TokensError(
            f"{out} holds token files of other inputs or options already, or with other files of"
            " the tokenizer; choose another folder"
        )
    token_files.compare(out)
    shards = json.loads((out / "tokens.json").read_text())["shards"]
    print(f"{out} is there already, of these inputs: {_summary(shards)}")


def _begin(out: pathlib.Path, plan: str) -> pathlib.Path:
    """Make or enter an unfinished folder. Return the file that says what it is made of.

    Raises TokensError: it holds other files, or was begun with other inputs.
    """
    if out.is_dir() and not (out / PARTIAL).exists():
        others = sorted(path.name for path in out.iterdir() if path.is_file())
        others = [name for name in others if name != LEASE and not name.startswith(".")]
        if others:
            raise TokensError(f"{out} holds other files, such as {others[0]}; name a new folder")
    (out / PARTIAL).mkdir(parents=True, exist_ok=True)
    marker = out / PARTIAL / "plan"
    if marker.exists() and marker.read_text() != plan:
        raise TokensError(
            f"{out} was begun with other inputs or options, or other files of the tokenizer; "
            "remove it, or choose another folder"
        )
    atomic_write.write(marker, plan)
    return marker


def _make_shards(out: pathlib.Path, parts: Sequence[Part], options: Options, workers: int) -> None:
    """Make the shards that are missing, and print how far it is."""
    todo = [i for i in range(len(parts)) if not _entry(out, i).exists()]
    n_made = len(parts) - len(todo)
    if n_made:
        print(f"resuming: {n_made} of {len(parts)} shards are done", file=sys.stderr)
    began = time.monotonic()
    end = "" if sys.stderr.isatty() else "\n"
    jobs = [_Job(out, i, parts[i], options) for i in todo]
    with contextlib.ExitStack() as closing:
        if workers > 1:
            # Spawned, not forked: tokenizers and pyarrow have threads.
            context = multiprocessing.get_context("spawn")
            n_processes = min(workers, max(len(jobs), 1))
            pool = closing.enter_context(context.Pool(n_processes, _share_cores, (n_processes,)))
            results: Iterable[None] = pool.imap_unordered(_make_shard, jobs)
        else:
            results = map(_make_shard, jobs)
        for n, _ in enumerate(results, 1):
            seconds = time.monotonic() - began
            seconds_left = seconds / n * (len(jobs) - n)
            print(
                f"\r{n}/{len(jobs)} shards, {seconds:.0f} s, {seconds_left:.0f} s left ",
                end=end,
                file=sys.stderr,
            )


def _report_bad_rows(bad_rows: Sequence[str], skip: int) -> None:
    """Print the rows of no text. Raises TokensError if they are more than may be skipped."""
    if len(bad_rows) > skip:
        lines = [f"\n  {line}" for line in bad_rows[:SHOWN]]
        if len(bad_rows) > SHOWN:
            lines.append(f"\n  and {len(bad_rows) - SHOWN} more: --errors FILE lists every one")
        raise TokensError(
            f"{len(bad_rows)} rows hold no text; fix them, or skip up to N of them with --skip"
            f" N:{''.join(lines)}",
            listed=bad_rows,
        )
    for line in bad_rows:
        print(f"skipped: {line}", file=sys.stderr)


def _report_special_tokens(encoder: "_Encoder", counts: "_Counts") -> None:
    names = ", ".join(encoder.specials.get(i, str(i)) for i in encoder.ends)
    if counts.ended and encoder.eos is not None:
        print(
            f"texts that end with {names} themselves, and get no second one: {counts.ended:,}",
            file=sys.stderr,
        )
    elif encoder.ends and encoder.eos is None:
        ended = "no document ends with a token"
        if counts.ended:
            ended = f"documents that end with a token: {counts.ended:,}"
        print(f"{ended}; the tokenizer's own files name {names} (--eos)", file=sys.stderr)
    if encoder.added:
        print(
            f"the tokenizer itself would add {' '.join(encoder.added)} to each text; no such token"
            " is added",
            file=sys.stderr,
        )
    if counts.with_end_inside:
        print(
            f"texts with {names} inside, where a text ends: {counts.with_end_inside:,}; make a"
            " document of each part",
            file=sys.stderr,
        )
    if counts.specials:
        print(
            f"{counts.specials:,} special tokens come from their names inside texts;"
            " --specials-as-text splits such a name like any text",
            file=sys.stderr,
        )


def _summary(shards: Sequence[dict[str, Any]]) -> str:
    n_documents = sum(shard["documents"] for shard in shards)
    n_tokens = sum(shard["tokens"] for shard in shards)
    n_bytes = sum(shard["bytes"] for shard in shards)
    return f"{n_documents:,} documents, {n_tokens:,} tokens of {n_bytes:,} bytes"


def _files(inputs: Sequence[str]) -> list[pathlib.Path]:
    """Return the files of all inputs, in order. Raises TokensError."""
    all_files: list[pathlib.Path] = []
    for name in inputs:
        path = files_lib.expanded(name)
        if path.is_dir():
            files = _files_below(path)
        elif path.is_file():
            files = [path]
        else:
            files = files_lib.matches(path)
        if not files:
            raise TokensError(
                f"{name} is not a file, nor a folder or glob with files that end in one of:"
                f" {', '.join(ENDINGS)}"
            )
        for file in files:
            if _ending(file) not in ENDINGS:
                raise TokensError(
                    f"{file} ends in {file.suffix or 'nothing'}; expected one of:"
                    f" {', '.join(ENDINGS)}"
                )
        all_files += files
    return all_files


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files below a folder that are read, and count the others."""
    read_files = []
    other_files = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if _ending(path) in ENDINGS and not _is_hidden(path, folder):
            read_files.append(path)
        else:
            other_files.append(path)
    _report_passed_over(folder, other_files)
    for file in read_files:
        remedy = "; name that file itself, or the folder that it lies in"
        files_lib.inside(folder, str(file.relative_to(folder)), remedy=remedy)
    return read_files


def _ending(path: pathlib.Path) -> str:
    return path.suffix.lower()


def _is_hidden(path: pathlib.Path, folder: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _report_passed_over(folder: pathlib.Path, files: Sequence[pathlib.Path]) -> None:
    """Print how many files below a folder are not read, by their endings."""
    if not files:
        return
    kinds: collections.Counter[str] = collections.Counter()
    for path in files:
        kinds["hidden" if _is_hidden(path, folder) else _ending(path) or "no ending"] += 1
    counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common(10))
    example = files[0].relative_to(folder)
    print(
        f"{folder}: {len(files):,} files in it are not read ({counts}), for example {example}",
        file=sys.stderr,
    )


def _paragraphs(text: str) -> list[str]:
    """Return the lines between blank lines, which hold nothing but blanks and tabs."""
    lines = files_lib.lines(text)
    groups = itertools.groupby(lines, key=lambda line: bool(line.strip(" \t")))
    return ["\n".join(group) for holds_text, group in groups if holds_text]


def _parts(path: pathlib.Path) -> Iterator[Part]:
    if _ending(path) in TEXT:
        yield Part(str(path), 0, 0)
    elif _ending(path) in LINES:
        size = path.stat().st_size
        n_bytes = max(LEAST_PART, min(PART, size // PARTS))
        for begin in range(0, max(size, 1), n_bytes):
            yield Part(str(path), begin, min(begin + n_bytes, size))
    else:
        table = _open(path)
        n_parts = table.num_row_groups if _ending(path) in PARQUET else len(table)
        for i in range(n_parts):
            yield Part(str(path), i, i + 1)


def _open(path: pathlib.Path) -> Any:
    """Return a Parquet file, or the batches of an Arrow one. Raises TokensError."""
    try:
        if _ending(path) in PARQUET:
            return pq.ParquetFile(path, memory_map=True)
        return columnar.arrow(path)[1]
    except (pa.ArrowException, OSError) as error:
        raise TokensError(f"{path} cannot be read: {first_line(error)}") from error


Rows = Iterator[tuple[str, Any]]  # place and value; anything but a string is a bad row


def _texts(part: Part, options: Options) -> Rows:
    """Yield (place, text) for each document of a part. Anything but a string is a bad row."""
    path = pathlib.Path(part.path)
    if _ending(path) in TEXT:
        return _texts_of_file(path, options.documents)
    if _ending(path) in LINES:
        return _texts_of_lines(path, part, options.column)
    return _texts_of_column(path, part, options.column)


def _texts_of_file(path: pathlib.Path, documents: str) -> Rows:
    try:
        text = files_lib.read(path, most=machine.most_memory()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield f"{path}: is not UTF-8 ({error.reason} at byte {error.start})", None
        return
    if documents == "file":
        pieces = [text]
    else:
        pieces = files_lib.lines(text) if documents == "line" else _paragraphs(text)
    for i, piece in enumerate(pieces):
        if piece.strip():
            yield f"{path}: {documents} {i}", piece


def _texts_of_lines(path: pathlib.Path, part: Part, column: str) -> Rows:
    for start, line in _lines(path, part):
        if not line.strip():
            continue
        where = f"{path}: line at byte {start}"
        try:
            row = json.loads(line)
            value = row.get(column) if isinstance(row, dict) else None
            if isinstance(value, str):
                value.encode()  # half of a character is no text
        except (ValueError, RecursionError) as error:
            yield f"{where} is not JSON ({error})", None
            continue
        if isinstance(row, dict) and not isinstance(value, str):
            _refuse_conversations(path, column, conversations.column_of(row), set(row))
        yield f"{where}, column {column!r}", value


def _refuse_conversations(
    path: pathlib.Path, column: str, of_conversations: str, names: set[str]
) -> None:
    """Raise TokensError for rows that become texts by a template, or of several columns."""
    if of_conversations and (column == of_conversations or column not in names):
        raise TokensError(f"{path}: {conversations.problem(of_conversations)}")
    remedy = conversations.joined(names)
    if remedy and column not in names:
        raise TokensError(f"{path} has no column {column!r}{remedy}")


def _lines(path: pathlib.Path, part: Part) -> Iterator[tuple[int, bytes]]:
    """Yield (place in the file, line) for the lines that begin in a part. Raises TokensError."""
    with path.open("rb") as file:
        file.seek(max(part.begin - 1, 0))
        if part.begin:
            # The line that holds the byte before: it begins in the part before, or ends there.
            piece = file.readline(PIECE)
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(PIECE)
        while file.tell() < part.end:
            start = file.tell()
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise TokensError(
                    f"{path}: the line at byte {start:,} is longer than {LONGEST_LINE:,} bytes;"
                    " split it"
                )
            yield start, line


def _texts_of_column(path: pathlib.Path, part: Part, column: str) -> Rows:
    table = _open(path)
    is_parquet = _ending(path) in PARQUET
    try:
        schema = table.schema_arrow if is_parquet else table[part.begin].schema
        names = schema.names
    except UnicodeDecodeError as error:
        raise TokensError(
            f"{path} is damaged: the name of a column is not UTF-8 ({error.reason})"
        ) from error
    of_conversations = conversations.column_of_schema(schema)
    _refuse_conversations(path, column, of_conversations, set(names))
    if column not in names:
        raise TokensError(
            f"{path} has no column {column!r}; expected one of: {', '.join(names)} (--column)"
        )
    try:
        if is_parquet:
            rows = table.read_row_group(part.begin, columns=[column])
        else:
            rows = table[part.begin].select([column])
        # pyarrow takes a file's word for where its values lie
        rows.column(0).validate(full=True)
        values = rows.column(0).to_pylist()
    except (pa.ArrowException, ValueError, OSError, KeyError) as error:
        raise TokensError(f"{path}: part {part.begin} is damaged: {first_line(error)}") from error
    for i, value in enumerate(values):
        yield f"{path}: row {i} of part {part.begin}, column {column!r}", value


def _share_cores(n_processes: int) -> None:
    """Let this process's tokenizer have its share of the cores, not a thread for each of them."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(machine.cores() // n_processes, 1)))


class _Job(NamedTuple):
    """A shard to make."""

    out: pathlib.Path
    number: int
    part: Part
    options: Options


def _make_shard(job: _Job) -> None:
    encoder = _tokenizer(job.options)
    bad_rows = []
    documents = []
    sizes = []
    first_sizes = []
    counts = _Counts()
    is_special = _special_table(encoder)

    def usable() -> Iterator[str]:
        for where, text in _texts(job.part, job.options):
            if isinstance(text, str):
                yield text
            else:
                bad_rows.append(f"{where}: holds {text if text is None else type(text).__name__}")

    all_texts = usable()
    while texts := list(itertools.islice(all_texts, BATCH)):
        for (ids, first_size), text in zip(encoder.encode(texts), texts, strict=True):
            tokens = np.asarray(ids, np.int64)
            documents.append(_ended(tokens, encoder.eos))
            sizes.append(len(text.encode()))
            first_sizes.append(first_size)
            special = tokens[is_special[tokens]]
            if special.size:
                counts += _count(tokens, special, encoder)
    dtype = token_files.token_dtype(encoder.vocab)
    name = f"{job.number:05}"
    shard = token_files.write_shard(job.out, name, documents, sizes, dtype, first_sizes)
    entry = {"shard": shard, "bad": bad_rows, "counts": dataclasses.asdict(counts)}
    atomic_write.write(_entry(job.out, job.number), json.dumps(entry))


@dataclasses.dataclass
class _Counts:
    """The tokens of texts that come from names in them."""

    ended: int = 0  # texts whose last token ends a text
    with_end_inside: int = 0  # texts with such a token before their end
    specials: int = 0  # other special tokens

    def __iadd__(self, other: "_Counts") -> "_Counts":
        self.ended += other.ended
        self.with_end_inside += other.with_end_inside
        self.specials += other.specials
        return self


def _ended(tokens: np.ndarray, eos: int | None) -> np.ndarray:
    """Return a text's tokens with the end of a text, unless they have it."""
    if eos is None or (tokens.size and tokens[-1] == eos):
        return tokens
    return np.append(tokens, eos)


def _special_table(encoder: "_Encoder") -> np.ndarray:
    """Return whether each token is a special one or ends a text, bool [vocab]."""
    special_ids = [*encoder.ends, *encoder.specials]
    is_special = np.zeros(max([encoder.vocab - 1, *special_ids]) + 1, bool)
    is_special[special_ids] = True
    return is_special


def _count(tokens: np.ndarray, special: np.ndarray, encoder: "_Encoder") -> _Counts:
    is_end = np.isin(special, encoder.ends)
    is_ended = int(tokens[-1]) in encoder.ends
    n_ends = int(is_end.sum())
    return _Counts(int(is_ended), int(n_ends > is_ended), special.size - n_ends)


class _Encoder(NamedTuple):
    vocab: int
    eos: int | None  # id that is added to every document
    # ids that end a text: eos, else those that the tokenizer's own files name
    ends: tuple[int, ...]
    specials: dict[int, str]  # id -> the special token
    added: list[str]  # that the tokenizer would add around a text
    # ids of each text, and the bytes of its first token
    encode: Callable[[Sequence[str]], list[tuple[list[int], int]]]


def _tokenizer(options: Options) -> _Encoder:
    if options.tokenizer == "bytes":
        if options.eos:
            raise TokensError(f"--eos is {options.eos!r}, and bytes have no such token; omit it")
        return _Encoder(256, None, (), {}, [], _encode_bytes)
    path = files_lib.expanded(options.tokenizer)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a file here"
        remedy = "give the path of a tokenizer.json of Hugging Face, or bytes"
        if (path / "tokenizer.json").is_file():
            remedy = f"give {path / 'tokenizer.json'}"
        raise TokensError(f"--tokenizer is {options.tokenizer!r}, {kind}; {remedy}")
    tokenizer = open_tokenizer(path, specials=options.specials)
    eos = tokenizer.id_of(options.eos) if options.eos else None
    if options.eos and eos is None:
        raise TokensError(
            f"--eos is {options.eos!r}, a token that {path} does not have; choose one of its"
            " special tokens"
        )
    ends = tokenizer.ends() if eos is None else (eos,)
    return _Encoder(
        tokenizer.vocab, eos, ends, tokenizer.specials, tokenizer.added, tokenizer.measured
    )


def _encode_bytes(texts: Sequence[str]) -> list[tuple[list[int], int]]:
    return [(list(text.encode()), min(len(text), 1)) for text in texts]


def _entry(out: pathlib.Path, number: int) -> pathlib.Path:
    return out / PARTIAL / f"{number:05}.json"


def _digest(
    files: Sequence[pathlib.Path],
    options: Options,
    ends: Sequence[int],
    companions: Mapping[str, bytes],
) -> str:
    """Identify the inputs and options that an unfinished folder was begun with."""
    digests = {name: hashlib.sha256(companions[name]).hexdigest() for name in sorted(companions)}
    stamps = []
    for path in files:
        status = path.stat()
        stamps.append((str(path.absolute()), status.st_size, files_lib.changed_ns(status)))
    identity = json.dumps([stamps, [*options], digests, [*ends], PART, LEAST_PART])
    return hashlib.sha256(identity.encode()).hexdigest()
