"""Benches of this repository: python -m tools.bench SUBCOMMAND [options]

loader   the loader against the other ways to load audio
train    a training step against PyTorch's on the same cores
index    the cost of making and of opening an index
windows  the cost of a window out of a long file, by codec
verify   the cost of digests and of verified steps
memory   the cost of steps in memory
text     jaxtrain tokens against the batches of tokenizers
feeding  the loader by number of threads and processes
builds   builds of the extension against each other
forest   a random forest on MFCC, the baseline of configs/folder.py
forecast the forecast times of steps against measured ones
rendezvous the rendezvous of up to 1,024 light processes

`python -m tools.bench SUBCOMMAND --help` has the options of one.
"""

import runpy
import sys

SUBCOMMANDS = (
    "loader",
    "train",
    "index",
    "windows",
    "verify",
    "memory",
    "text",
    "feeding",
    "builds",
    "forest",
    "forecast",
    "rendezvous",
)


def main() -> int:
    subcommand = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if subcommand in ("-h", "--help"):
        print(__doc__, end="")
        return 0
    if subcommand not in SUBCOMMANDS:
        expected = ", ".join(SUBCOMMANDS)
        print(f"there is no bench {subcommand!r}; expected one of: {expected}", file=sys.stderr)
        return 2
    del sys.argv[1]
    runpy.run_module(f"tools.bench_{subcommand}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
