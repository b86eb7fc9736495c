"""`jaxtrain tokens` in turn with the batches of `tokenizers`, on the same text and cores.

    python -m tools.bench text  # 200 MB, two workers
    python -m tools.bench text --megabytes 20 --rounds 3
    python -m tools.bench text --folder /tmp/text  # its text is made once, and kept there

The other side reads the same JSONL, encodes 1,000 documents at a time by ``encode_batch``, whose
threads share the cores, and writes the tokens to one file. With --fast it takes
``encode_batch_fast``, which finds no places in the text, as jaxtrain does. Both sides are processes
of their own, and take turns. Compare wall times on a quiet machine, and CPU times on a busy one.
The text is of random words whose frequencies fall as in a language, and the tokenizer, a BPE of
8,192 tokens at the level of bytes, is made from a part of it.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

import numpy as np

from loaders.io import atomic_write

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCAB, WORDS = 8_192, 60_000
BATCH = 1_000  # documents
SYLLABLES = (
    "ba ce di fo gu la me ni ro su ta ve wi xo zu th st ing er ion qua per con re un".split()
)
PEER = """
import json, sys
import numpy as np, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
end = tokenizer.token_to_id("<eos>")

def batches():
    documents = []
    with open(sys.argv[2]) as lines:
        for line in lines:
            documents.append(json.loads(line)["text"])
            if len(documents) == int(sys.argv[4]):
                yield documents
                documents = []
    yield documents

n = 0
with open(sys.argv[3], "wb") as out:
    for documents in batches():
        for encoded in getattr(tokenizer, sys.argv[5])(documents, add_special_tokens=False):
            tokens = np.array([*encoded.ids, end], np.uint16)
            n += len(tokens)
            out.write(tokens.tobytes())
print(n)
"""


def make_text(file: IO[bytes], n_bytes: int) -> None:
    """Write documents of 600 words on average as JSONL."""
    rng = np.random.default_rng(0)
    n_syllables = rng.integers(1, 5, WORDS)
    words = np.array(["".join(rng.choice(SYLLABLES, n)) for n in n_syllables])
    frequency = 1 / (np.arange(WORDS) + 10.0)
    frequency /= frequency.sum()
    written = 0
    while written < n_bytes:
        size = int(np.clip(rng.lognormal(6.0, 0.9), 5, 20_000))
        text = " ".join(words[rng.choice(WORDS, size, p=frequency)]).capitalize() + ".\n"
        written += file.write(json.dumps({"text": text}).encode() + b"\n")


def make_tokenizer(text: pathlib.Path, path: pathlib.Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open() as lines:
        sample = [json.loads(line)["text"] for line, _ in zip(lines, range(BATCH), strict=False)]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


def run(command: Sequence[str], env: dict[str, str]) -> tuple[float, float, str]:
    """Return wall and CPU seconds of a process and its children, and its output."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    began, before = time.perf_counter(), spent()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **env}, cwd=ROOT
    )
    return time.perf_counter() - began, spent() - before, done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tools.bench text", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="the other side by encode_batch_fast")
    parser.add_argument("--folder", type=pathlib.Path, help="of text and tokenizer, which are kept")
    args = parser.parse_args(argv)
    if min(args.megabytes, args.workers, args.rounds) < 1:
        parser.error("--megabytes, --workers and --rounds are 1 at least")
    with contextlib.ExitStack() as closing:
        folder = args.folder or pathlib.Path(
            closing.enter_context(tempfile.TemporaryDirectory(prefix="bench-text-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        text, tokenizer = folder / f"{args.megabytes}.jsonl", folder / "tokenizer.json"
        if not text.exists():
            with atomic_write.file(text) as file:
                make_text(file, 1_000_000 * args.megabytes)
            make_tokenizer(text, tokenizer)
        return compare(args, text, tokenizer)


def compare(args: argparse.Namespace, text: pathlib.Path, tokenizer: pathlib.Path) -> int:
    out = text.parent / "tokens"
    ours = [sys.executable, "-m", "jaxtrain", "tokens", str(out), str(text)]
    ours += [f"--tokenizer={tokenizer}", "--eos=<eos>", f"--workers={args.workers}"]
    theirs = [sys.executable, "-c", PEER, str(tokenizer), str(text), f"{out}.bin", str(BATCH)]
    theirs.append("encode_batch_fast" if args.fast else "encode_batch")
    of_peer = {"RAYON_NUM_THREADS": str(args.workers), "TOKENIZERS_PARALLELISM": "true"}
    ratios: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        shutil.rmtree(out, ignore_errors=True)
        wall, cpu, _ = run(ours, {})
        their_wall, their_cpu, printed = run(theirs, of_peer)
        tokens = int(printed)
        same = n_tokens(out) == tokens
        ratios.append((their_wall / wall, their_cpu / cpu))
        print(
            f"jaxtrain {wall:.1f} s, {cpu:.1f} CPU s; tokenizers {their_wall:.1f} s,"
            f" {their_cpu:.1f} CPU s; {tokens:,} tokens{'' if same else ', AND OURS DIFFER'}",
            flush=True,
        )
        if not same:
            return 1
    for name, values in zip(("wall", "CPU"), zip(*ratios, strict=True), strict=True):
        middle = statistics.median(values)
        print(f"tokenizers / jaxtrain, {name}: median {middle:.2f}, min {min(values):.2f}")
    return 0


def n_tokens(folder: pathlib.Path) -> int:
    about = json.loads((folder / "tokens.json").read_text())
    return sum(int(shard["tokens"]) for shard in about["shards"])


if __name__ == "__main__":
    sys.exit(main())
