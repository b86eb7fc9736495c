"""Each benchmark that has no test of its own runs, on few rows: a page quotes its figures."""

import subprocess
import sys

import pytest

SMALL = {
    "index --rows=20000 --recordings=500 --files=20": "from the cache: 20000 rows",
    "windows --hours=0.02 --windows=2": "MP3, variable",
    "verify --workload trm --steps 2 --out {out}": "| trm |",
    "memory --workload trm --pairs 1 --every 1 --out {out}": "| trm |",
    "feeding --codecs=wav --forms=waveform --threads=1 --seconds=0.2 --rounds=1 --recordings=8": (
        "waveform of 320,000 bytes"
    ),
    "text --megabytes=1 --rounds=1 --folder={out}": "tokenizers / jaxtrain, CPU",
    "builds {build} {build} --rounds 1 --recordings 3": "| waveform | prepared, packed |",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed"), SMALL.items(), ids=[command.split()[0] for command in SMALL]
)
def test_a_benchmark_runs(tmp_path, command, printed):
    from loaders import _rust

    if command.startswith("text"):
        pytest.importorskip("tokenizers")
    words = command.format(out=tmp_path, build=_rust.__file__).split()
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *words], capture_output=True, text=True
    )
    assert printed in done.stdout and "Traceback" not in done.stderr, done.stderr
