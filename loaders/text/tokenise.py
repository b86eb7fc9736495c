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
import hashlib
import itertools
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loaders.io import atomic_write, columnar, machine
from loaders.io import files as files_lib
from loaders.io.checks import UserError, first_line
from loaders.text import token_files
from loaders.text import tokenizer as tokenizer_lib
from loaders.text.tokenizer import open_tokenizer

TEXT, LINES, PARQUET, ARROW = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",), (".arrow",)
PART = 32 << 20  # [bytes] of a JSONL file in one shard
PIECE = 1 << 20  # [bytes] of a line that is passed over
LONGEST_LINE = 1 << 30  # [bytes] of a JSONL file, which are in memory together
PARTIAL = ".parts"  # folder of the entries of finished shards
# file of a finished folder: the digest of its inputs and options, by which the same command knows
# it
MADE_OF = "made_of"


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
    own = options.tokenizer != "bytes"
    companions = (
        tokenizer_lib.read_files(files_lib.expanded(options.tokenizer), links=True) if own else {}
    )
    plan = _digest(files, options, encoder.ends, companions)
    if (out / "tokens.json").exists() and not (out / PARTIAL).exists():
        if (out / MADE_OF).exists() and (out / MADE_OF).read_text() == plan:
            print(
                f"{out} is there already, of these inputs:"
                f" {_summary(json.loads((out / 'tokens.json').read_text())['shards'])}"
            )
            return
        raise TokensError(
            f"{out} holds token files of other inputs or options already, or with other files of"
            " the tokenizer; choose another folder"
        )
    (out / PARTIAL).mkdir(parents=True, exist_ok=True)
    marker = out / PARTIAL / "plan"
    if marker.exists() and marker.read_text() != plan:
        raise TokensError(
            f"{out} was begun with other inputs or options, or other files of the tokenizer; "
            "remove it, or choose another folder"
        )
    atomic_write.write(marker, plan)
    todo = [i for i in range(len(parts)) if not _entry(out, i).exists()]
    if len(todo) < len(parts):
        print(
            f"resuming: {len(parts) - len(todo)} of {len(parts)} shards are done", file=sys.stderr
        )
    began = time.monotonic()
    jobs = ((out, i, parts[i], options) for i in todo)
    # Spawned, not forked: tokenizers and pyarrow have threads.
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(min(workers, max(len(todo), 1))) if workers > 1 else contextlib.nullcontext()
    ) as pool:
        for done, _ in enumerate(
            pool.imap_unordered(_shard, jobs) if pool else map(_shard, jobs), 1
        ):
            seconds = time.monotonic() - began
            print(
                f"\r{done}/{len(todo)} shards, {seconds:.0f} s,"
                f" {seconds / done * (len(todo) - done):.0f} s left ",
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
            )
    entries = [json.loads(_entry(out, i).read_text()) for i in range(len(parts))]
    bad = [line for entry in entries for line in entry["bad"]]
    if len(bad) > skip:
        listed = "".join(f"\n  {line}" for line in bad[:20])
        raise TokensError(
            f"{len(bad)} rows hold no text; fix them, or skip up to N of them with --skip"
            f" N:{listed}"
        )
    for line in bad:
        print(f"skipped: {line}", file=sys.stderr)
    name = None
    if own:
        name = "tokenizer.json"
        for each, content in companions.items():
            (out / each).parent.mkdir(exist_ok=True)
            with atomic_write.file(out / each) as file:
                file.write(content)
    shards = [entry["shard"] for entry in entries]
    token_files.write_about(
        out, vocab=encoder.vocab, eos=encoder.eos, ends=encoder.ends, tokenizer=name, shards=shards
    )
    if encoder.ends and encoder.eos is None:
        named = ", ".join(encoder.specials.get(i, str(i)) for i in encoder.ends)
        print(
            f"no document ends with a token; the tokenizer's own files name {named} (--eos)",
            file=sys.stderr,
        )
    if encoder.added:
        print(
            f"the tokenizer itself would add {' '.join(encoder.added)} to each text; no such token"
            " is added",
            file=sys.stderr,
        )
    if held := sum(entry.get("specials", 0) for entry in entries):
        print(
            f"{held:,} special tokens come from their names inside texts; --specials-as-text splits"
            " such a name like any text",
            file=sys.stderr,
        )
    for i in range(len(parts)):
        _entry(out, i).unlink()
    marker.rename(out / MADE_OF)
    (out / PARTIAL).rmdir()
    print(f"{out}: {_summary(shards)}; {len(bad)} skipped")


def _summary(shards: Sequence[dict[str, Any]]) -> str:
    total = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return (
        f"{total['documents']:,} documents, {total['tokens']:,} tokens of {total['bytes']:,} bytes"
    )


def _files(inputs: Sequence[str]) -> list[pathlib.Path]:
    known, every_file = (*TEXT, *LINES, *PARQUET, *ARROW), []
    for name in inputs:
        path = files_lib.expanded(name)
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file())
            inside = [p for p in below if _ending(p) in known and not _is_hidden(p, path)]
            _report_passed_over(path, sorted({*below} - {*inside}))
            for file in inside:
                remedy = "; name that file itself, or the folder that it lies in"
                files_lib.inside(path, str(file.relative_to(path)), remedy=remedy)
        else:
            inside = [path] if path.is_file() else files_lib.matches(path)
        if not inside:
            raise TokensError(
                f"{name} is not a file, nor a folder or glob with files that end in one of:"
                f" {', '.join(known)}"
            )
        for file in inside:
            if _ending(file) not in known:
                raise TokensError(
                    f"{file} ends in {file.suffix or 'nothing'}; expected one of:"
                    f" {', '.join(known)}"
                )
        every_file += inside
    return every_file


def _ending(path: pathlib.Path) -> str:
    return path.suffix.lower()


def _is_hidden(path: pathlib.Path, folder: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _report_passed_over(folder: pathlib.Path, files: Sequence[pathlib.Path]) -> None:
    """Print how many files below a folder are not read, by their endings."""
    kinds = (
        "hidden" if _is_hidden(path, folder) else _ending(path) or "no ending" for path in files
    )
    if files:
        counts = ", ".join(
            f"{n:,} {kind}" for kind, n in collections.Counter(kinds).most_common(10)
        )
        example = files[0].relative_to(folder)
        print(
            f"{folder}: {len(files):,} files in it are not read ({counts}), for example {example}",
            file=sys.stderr,
        )


def _paragraphs(text: str) -> list[str]:
    """Return the lines between blank lines, which hold nothing but blanks and tabs."""
    grouped = itertools.groupby(files_lib.lines(text), key=lambda line: bool(line.strip(" \t")))
    return ["\n".join(lines) for holds_text, lines in grouped if holds_text]


def _parts(path: pathlib.Path) -> Iterator[Part]:
    if _ending(path) in TEXT:
        yield Part(str(path), 0, 0)
    elif _ending(path) in LINES:
        size = path.stat().st_size
        for begin in range(0, max(size, 1), PART):
            yield Part(str(path), begin, min(begin + PART, size))
    else:
        table = _open(path)
        n = table.num_row_groups if _ending(path) in PARQUET else len(table)
        yield from (Part(str(path), i, i + 1) for i in range(n))


def _open(path: pathlib.Path) -> Any:
    """Return a Parquet file, or the batches of an Arrow one. Raises TokensError."""
    try:
        if _ending(path) in PARQUET:
            return pq.ParquetFile(path, memory_map=True)
        return columnar.arrow(path)[1]
    except (pa.ArrowException, OSError) as error:
        raise TokensError(f"{path} cannot be read: {first_line(error)}") from error


def _texts(part: Part, options: Options) -> Iterator[tuple[str, Any]]:
    """Yield (place, text) for each document of a part. Anything but a string is a bad row."""
    path = pathlib.Path(part.path)
    if _ending(path) in TEXT:
        try:
            text = files_lib.read(path, most=machine.most_memory()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield f"{path}: is not UTF-8 ({error.reason} at byte {error.start})", None
            return
        split: dict[str, Callable[[str], list[str]]] = {
            "file": lambda text: [text],
            "line": files_lib.lines,
            "paragraph": _paragraphs,
        }
        for i, piece in enumerate(split[options.documents](text)):
            if piece.strip():
                yield f"{path}: {options.documents} {i}", piece
    elif _ending(path) in LINES:
        with path.open("rb") as file:
            file.seek(max(part.begin - 1, 0))
            if part.begin:
                # The line that holds the byte before: it begins in the part before, or ends there.
                while (rest := file.readline(PIECE)) and not rest.endswith(b"\n"):
                    pass
            while file.tell() < part.end and (line := file.readline(LONGEST_LINE + 1)):
                if len(line) > LONGEST_LINE:
                    begin = file.tell() - len(line)
                    raise TokensError(
                        f"{path}: the line at byte {begin:,} is longer than {LONGEST_LINE:,} bytes;"
                        " split it"
                    )
                if not line.strip():
                    continue
                where = f"{path}: line at byte {file.tell() - len(line)}"
                try:
                    row = json.loads(line)
                    value = row.get(options.column) if isinstance(row, dict) else None
                    if isinstance(value, str):
                        value.encode()  # half of a character is no text
                except (ValueError, RecursionError) as error:
                    yield f"{where} is not JSON ({error})", None
                else:
                    yield f"{where}, column {options.column!r}", value
    else:
        table = _open(path)
        try:
            names = (
                table.schema_arrow if _ending(path) in PARQUET else table[part.begin].schema
            ).names
        except UnicodeDecodeError as error:
            raise TokensError(
                f"{path} is damaged: the name of a column is not UTF-8 ({error.reason})"
            ) from error
        if options.column not in names:
            raise TokensError(
                f"{path} has no column {options.column!r}; expected one of: {', '.join(names)}"
                " (--column)"
            )
        try:
            if _ending(path) in PARQUET:
                rows = table.read_row_group(part.begin, columns=[options.column])
            else:
                rows = table[part.begin].select([options.column])
            # pyarrow takes a file's word for where its values lie
            rows.column(0).validate(full=True)
            values = rows.column(0).to_pylist()
        except (pa.ArrowException, ValueError, OSError, KeyError) as error:
            raise TokensError(
                f"{path}: part {part.begin} is damaged: {first_line(error)}"
            ) from error
        for i, value in enumerate(values):
            yield f"{path}: row {i} of part {part.begin}, column {options.column!r}", value


def _shard(job: tuple[pathlib.Path, int, Part, Options]) -> None:
    out, number, part, options = job
    encoder = _tokenizer(options)
    end = [] if encoder.eos is None else [encoder.eos]
    bad, documents, sizes, firsts = [], [], [], []
    held = 0  # special tokens inside the texts

    def usable() -> Iterator[str]:
        for where, text in _texts(part, options):
            if isinstance(text, str):
                yield text
            else:
                bad.append(f"{where}: holds {text if text is None else type(text).__name__}")

    rest = usable()
    while texts := list(itertools.islice(rest, 1000)):  # never all of a shard's texts in memory
        for (ids, first), text in zip(encoder.encode(texts), texts, strict=True):
            firsts.append(first)
            documents.append(np.asarray([*ids, *end], np.int64))
            held += sum(i in encoder.specials for i in ids)
            sizes.append(len(text.encode()))
    shard = token_files.write_shard(
        out, f"{number:05}", documents, sizes, token_files.token_dtype(encoder.vocab), firsts
    )
    atomic_write.write(
        _entry(out, number), json.dumps({"shard": shard, "bad": bad, "specials": held})
    )


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
        return _Encoder(
            256,
            None,
            (),
            {},
            [],
            lambda texts: [(list(text.encode()), min(len(text), 1)) for text in texts],
        )
    path = files_lib.expanded(options.tokenizer)
    if not path.is_file():
        inner = path / "tokenizer.json"
        remedy = (
            f"give {inner}"
            if inner.is_file()
            else "give the path of a tokenizer.json of Hugging Face, or bytes"
        )
        raise TokensError(
            f"--tokenizer is {options.tokenizer!r},"
            f" {'a folder' if path.is_dir() else 'not a file here'}; {remedy}"
        )
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


def _entry(out: pathlib.Path, number: int) -> pathlib.Path:
    return out / PARTIAL / f"{number:05}.json"


def _digest(
    files: Sequence[pathlib.Path],
    options: Options,
    ends: Sequence[int],
    companions: Mapping[str, bytes],
) -> str:
    """Identify the inputs and options that an unfinished folder was begun with."""
    content = {name: hashlib.sha256(companions[name]).hexdigest() for name in sorted(companions)}
    facts = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(
        json.dumps([facts, [*options], content, [*ends], PART]).encode()
    ).hexdigest()
