"""Every command that README, CONTRIBUTING, the pages of docs/ and the configs' docstrings show, and
how a test runs it.

    python -m tests.docs_commands FOLDER [--only=REGEX] [--quick]      in FOLDER, with the data of
                                                                       tests/docs_data.py

runs them in the order of the pages, prints a line for each, and ends with 1 if one did not do as
its rule says (`lacks`). A command that has passed in FOLDER is not run again.

A command without a rule fails tests/test_docs_commands.py. To add one, append a row to `RULES`: a
regular expression that the command matches, and one of

    Run("--config.… …")     it is run with these arguments appended: the sizes below make every
                            model and run tiny
    Run(says=REGEX)         the text that a reader would look for in its output; the outputs of
                            runs, --out and --help are checked anyway
    Run(leaves=(PATH,))     files that must exist afterwards
    Run(quick=True)         it takes seconds and needs no jax: `make test` runs it, too
    Why("…")                it is not run, for this reason

The first row that matches counts. Paths of the docs (/path/to/XCM) are replaced by those of small
data: `PLACES`.
"""

import argparse
import ast
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import NamedTuple

from tests.support.xla import KEEPS_PROGRAMS, SOON

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The pages of the workloads train the runs that other pages look at. Detections need runs of both.
DOCS = sorted(
    (ROOT / "docs").rglob("*.md"),
    key=lambda p: (p.stem == "bird-inference", p.parent.name != "workloads", p),
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))

# The sizes for each kind of training are appended to the command, so that they count.
RUN = (
    "--config.train.steps=2 --config.train.batch=4 --config.train.accumulate=1"
    " --config.train.eval_every=1 --config.train.eval_batches=1 --config.checkpoint.every=1"
    " --config.metrics.every=1"
)
BIRD = (
    f"{RUN} --config.model.embed=32 --config.model.depth=1 --config.model.heads=2"
    " '--config.model.patch=(32, 32)' --config.model.dtype=float32 --config.data.threads=1"
)
LANGUAGE = (
    f"{RUN} --config.model.embed=32 --config.model.depth=1 --config.model.heads=2"
    " --config.model.mlp=32 --config.model.dtype=float32 --config.model.context=64"
    " --config.data.context=64"
)
PRESET = (
    f"{LANGUAGE} --config.model.kv_heads=1 --config.model.head_dim=16 --config.model.vocab=None"
)
PRETRAINED = (
    f"{RUN} --config.model.context=64 --config.data.context=64 --config.model.dtype=float32"
)
GOLDEN = json.loads((ROOT / "tests" / "data" / "higgs" / "config.json").read_text())
HIGGS = (
    f"{RUN} --config.model.dtype=float32 --config.data.codebooks={GOLDEN['audio_num_codebooks']}"
    f" --config.data.codebook_size={GOLDEN['audio_codebook_size']} --config.data.buckets=1"
)
PUZZLES = (
    f"{RUN} --config.model.embed=32 --config.model.heads=2 --config.model.depth=1"
    " --config.model.inner_multiple=32 --config.model.puzzle_tokens=1"
    " --config.model.puzzle_embed=32 --config.model.cycles_high=1 --config.model.cycles_low=1"
    " --config.model.halt_steps=2 --config.model.dtype=float32"
)
GENERATED = "\"--config.data.sources=({'n_train': 20, 'n_test': 8, 'blanks': (10, 20)},)\""
OTHER = "\"--config.data.sources=({{'kind': '{}', 'n_train': 20, 'n_test': 8, 'side': {}}},)\""
GIBLET = (
    f"{RUN} '--config.model.video_widths=(16, 16, 16)' '--config.model.audio_widths=(8, 8)'"
    " '--config.model.text_widths=(8, 8)' '--config.model.trunk_widths=(16, 16)'"
    " --config.model.bottleneck=8 --config.model.head_width=16 '--config.model.decoder_widths=(16,"
    " 16, 16, 16)' '--config.model.decode_video_widths=(16, 16)'"
    " '--config.model.decode_audio_widths=(16, 16)' '--config.model.decode_text_widths=(16, 16)'"
    " --config.model.dtype=float32 --config.data.hrf_seconds=6"
)
SMALL_DATA = "--config.data.train=data/XCM"  # replaces the demo birds, which take a minute to make

# The paths of the docs and their replacements (tests/docs_data.py), and steps, replaced by those of
# a run of two steps.
PLACES = {
    "/path/to/XCM": "data/XCM",
    "/path/to/XCL": "data/XCM",
    "/data/XCM": "data/XCM",
    "/path/to/HSN-archive": "data/HSN-archive",
    "/path/to/HSN": "data/HSN",
    "/path/to/other": "data/XCM",
    "/path/to/esc10": "data/esc10",
    "/path/to/input.txt": "input.txt",
    "/path/to/sudoku": "puzzles",
    "giblet.py:/path/to/folder": "giblet.py:data/film",
    "giblet:/path/to/folder": "giblet:data/film",
    "checkpoints/500": "checkpoints/1",
    "{500,600}": "{1,2}",
}


class Run(NamedTuple):
    """The command is run, with ``more`` appended."""

    more: str = ""
    code: int = 0  # the exit code
    quick: bool = False  # True if `make test` runs it, too
    instead: tuple[tuple[str, str], ...] = ()  # (text of the command, its replacement)
    says: str = ""  # regular expression that its output matches
    leaves: tuple[str, ...] = ()  # paths that must exist afterwards


class Why(NamedTuple):
    """The command is not run."""

    reason: str


PLAN = r"--plan|jaxtrain plan"
# An index without one of them cannot be trained (configs/folder.py).
BOTH_SPLITS = r"test\w*: [1-9]\d* rows of [1-9]\d* recordings(.*\n)*train: [1-9]\d* rows of"
RULES: tuple[tuple[str, Run | Why], ...] = (
    # Not run: commands that install, test or measure, that need a cluster or a network, and
    # patterns that stand for many commands.
    (
        r"^make train$",
        Run(f"{BIRD} {SMALL_DATA}", instead=(("make train", "jaxtrain train --config=xcm"),)),
    ),
    (
        r"^make ",
        Why(
            "it installs and then runs what other rows run; the gate runs it, and the demos have"
            " tests of their parts"
        ),
    ),
    (
        r"^(make|pip install .*|source .*|pre-commit .*)$",
        Why("it changes the environment that the tests run in"),
    ),
    (
        r"^(docker|kubectl) ",
        Why(
            "it needs Docker or a cluster; tests/tools/test_container.py reads it, and what it is"
            " given"
        ),
    ),
    (r"^(\S*python -m )?pytest|^\.venv/bin/python -m pytest", Why("it is a test itself")),
    (
        r"plan .*--scale\b",
        Why("it compiles each size, for minutes; tests/plan/test_scale.py has small ones"),
    ),
    (
        r"plan .*--search$|--config\.mesh=auto\b",
        Why("it compiles several steps, for minutes; tests/plan/test_search.py runs small ones"),
    ),
    (
        r"--plan-setup|plan --setup",
        Why("it needs the network; tests/plan/test_environment.py runs it against a stand-in"),
    ),
    (
        r"plan --calibrate|tools\.bench( |$)|tools\.esc10_folds|tools\.trm_table|tools\.show_runs"
        r"|tools\.measure_card"
        r"|tests\.proofs\.(replay_proof|recovery|soak|search|options|scatters|starts)"
        r"|tests\.proofs\.(half_losses|demo_losses|programs)",
        Why("it measures, for minutes"),
    ),
    (
        r"tests\.docs_pictures",
        Why(
            "it writes pictures of the docs, from compiled plans for GPUs or from a measured table"
        ),
    ),
    (
        r"tools\.chip\.operations$",
        Why("it reads the trace of a run; tests/workloads/bird/test_run.py reads one by it"),
    ),
    (
        r"^python tools/gpu_check\.py( --only|$)|tools\.gpu_check --models",
        Why("it measures a card; tests/tools/test_gpu_check.py runs its parts"),
    ),
    (
        r"tools\.chip\.tpu_steps ",
        Why("it compiles for minutes; tests/compiled/test_tpu_steps.py compiles small ones by it"),
    ),
    (
        r"tools\.chip\.kernel_bundles ",
        Why("it needs the compiler for TPUs; tests/tools/test_kernel_bundles.py reads such a dump"),
    ),
    (
        r"tools\.chip\.document_blocks ",
        Why("it makes a corpus; tests/nn/test_document_blocks.py counts by the same function"),
    ),
    (
        r"JAXTRAIN_COORDINATOR=",
        Why("a pattern for two hosts; tests/test_train.py runs two such processes"),
    ),
    (r"^srun ", Why("it needs a SLURM; tests/doctor starts such a process by its variables")),
    (
        r"^jaxtrain doctor --config",
        Run(f"{BIRD} {SMALL_DATA}", says=r"data: rate .*[1-9][\d,]* rows/s"),
    ),
    (r"^jaxtrain doctor$", Run(says=r"devices: product .* are exact")),
    (
        r"launch.* --(status|tail)=",
        Why("it is of a job; tests/commands/test_launch_slurm.py asks a real SLURM"),
    ),
    (
        r"--config=…|higgs_demo(\.py)?:",
        Why("it stands for any config, or for what tools/demo_higgs.py fills in"),
    ),
    (r"RUN|DIR|FILE|NAME=VALUE", Why("a pattern; an example of it is in another row")),
    (r"my_config\.py|my_language|my_best", Why("tests/test_docs.py runs the files of these pages")),
    (r"model\.energy\.weight", Why("tests/test_docs.py runs the objective of docs/your-model.md")),
    (r"^tests/slurm_up\.sh$", Why("it starts a SLURM as root; the gate does so")),
    # Mentions of a command, without arguments or with only a flag.
    (r"^jaxtrain( [a-z-]+)?( --[a-z-]+)*$", Run("--help", quick=True)),
    (r"^python -m tools\.orbax_to_safetensors$", Run("--help", quick=True)),
    (r"--help$", Run()),
    (r"demo_chat\.tokenizer", Run(quick=True, leaves=("bytes.json",))),
    (r"^python -m tests\.proofs$", Run("--list", quick=True, says="kills +200 kills")),
    (r"^python -m tests\.proofs --list$", Run(quick=True, says="kills +200 kills")),
    (
        r"^jaxtrain plan --config=configs/lm\.py:llama",
        Why("it compiles for minutes; tests/compiled/test_mesh.py compiles four of its layers"),
    ),
    (
        r"^jaxtrain plan --config=shakespeare_char:\S+,gpu ",
        Why("it compiles for an H100; tests/workloads/test_language_dropout.py takes such steps"),
    ),
    (r"^python -m tests\.support\.step_walk$", Why("tests/test_floors.py compares its tables")),
    (
        r"^python -m tests\.test_prose ",
        Run(quick=True, says="median words", instead=(("FOLDER", "docs"),)),
    ),
    (r"^tools/launch_tpu\.sh$", Run("--help")),
    (r"tools\.write_reference$", Run("--check")),
    # Clusters: the job that would be submitted.
    (
        r"launch_slurm .*--dry-run|jaxtrain launch .*--dry-run",
        Run(
            quick=True,
            says=(
                r"#SBATCH --gpus-per-node=8\n(.*\n)*#SBATCH --nodes=2\n(.*\n)*#SBATCH"
                r" --time=720\n(.*\n)*srun "
            ),
        ),
    ),
    (
        r"launch_tpu\.sh --check .*--dry-run",
        Run(quick=True, says=r"create check .*--type=v5litepod --topology=2x2(.*\n)*.*tpu_check"),
    ),
    (
        r"tools\.tpu_check --cases=trm$",
        Why("it computes for a minute; tests/tools/test_tpu_check.py runs it"),
    ),
    (r"^python -m tools\.tpu_check$", Run("--help", quick=True)),
    (
        r"launch_tpu\.sh .*--dry-run",
        Run(
            quick=True,
            says=r"gcloud compute tpus queued-resources create xcm .*--accelerator-type[= ]v4-32",
        ),
    ),
    # Data.
    (
        r"^jaxtrain tokens (corpus|corpus-qwen)/train ",
        Run("--workers=1", quick=True, says=r"[1-9]\d* documents, [1-9][\d,]* tokens"),
    ),
    (
        r"^jaxtrain index --show",
        Run(quick=True, says=r"length \[s\]: ", leaves=("index-pictures/*.png",)),
    ),
    (r"^jaxtrain index .*--dry-run", Run(quick=True, says=r"start +start\n")),
    (r"^jaxtrain index found/", Run(says=BOTH_SPLITS)),
    (r"^jaxtrain prepare ", Run(quick=True, says=r"[1-9]\d* prepared now")),
    (r"^jaxtrain index ", Run(quick=True, says=BOTH_SPLITS)),
    (r"folder(\.py)?:.* --config\.warm_start", Run(BIRD)),
    (r"folder(\.py)?:", Run(BIRD)),
    (
        r"^jaxtrain sudoku ",
        Run(
            "--train 20 --test 8 --blanks 10 20",
            quick=True,
            says="28 puzzles in",
            leaves=("puzzles/train.csv", "puzzles/test.csv"),
        ),
    ),
    (
        r"^jaxtrain train-codec ",
        Run("--codebooks=4 --size=32 --components=8 --rounds=2", leaves=("codec.npz",)),
    ),
    (
        r"^jaxtrain encode-audio ",
        Run(says=r"[1-9]\d* recordings encoded, 0 were there already, 0 could not be encoded"),
    ),
    (
        r"^jaxtrain prove ",
        Run(
            f"--config=xcm {BIRD} {SMALL_DATA} --minutes=0 --steps=6 --kills=1",
            says="each ended with the same bits",
        ),
    ),
    (
        r"^jaxtrain replay ",
        Run(
            instead=(("--step 550 --until 560", "--step 2"),),
            says="identical to step 2: 1 recorded",
        ),
    ),
    # Looking ahead.
    (r"--explain|jaxtrain explain", Run(says=r"config\.train\.batch +\d+ +rows +global batch")),
    (rf"giblet(\.py)?:blank.*({PLAN})", Run(says=r"parameters on (.*\n)*this run has no problem")),
    (rf"higgs(\.py)?:blank.*({PLAN})", Run(says=r"parameters on (.*\n)*this run has no problem")),
    (
        rf"trm_sudoku.*({PLAN})",
        Run(
            f"{PUZZLES} --config.train.batch=32 {GENERATED}",
            says="held by each device between steps",
        ),
    ),
    # Training, at the sizes above.
    (
        r"my_model\.py.*--plan",
        Run(f"{RUN} --config.train.batch=8 {SMALL_DATA}", says="held by each device between steps"),
    ),
    (r"my_model\.py:index", Run(RUN)),
    (r"my_model\.py.*fsdp=8", Run(f"{RUN} --config.train.batch=8 {SMALL_DATA}")),
    (r"my_model\.py$", Run(f"{RUN} {SMALL_DATA}")),
    (
        r"xcm(\.py)?:.*,path/to/Bird-MAE",
        Run(f"{RUN} --config.model.dtype=float32 --config.data.threads=1"),
    ),
    (r"(xcm|xcl)(\.py)?:", Run(BIRD)),
    (r"=xcm .*lejepa", Run(f"{BIRD} {SMALL_DATA} --config.model.lejepa.hidden=16")),
    (
        r"=xcm .*mae",
        Run(
            f"{BIRD} {SMALL_DATA} --config.model.mae.decoder.embed=32"
            " --config.model.mae.decoder.depth=1"
        ),
    ),
    (r"=(configs/)?xcm(\.py)?(\s|$)", Run(f"{BIRD} {SMALL_DATA}")),
    (r"esc10(\.py)?:", Run(f"{BIRD} --config.train.ema=0.9")),
    (
        r"esc10_folds(\.py)?:",
        Run(f"{BIRD} --config.model.mae.decoder.embed=32 --config.model.mae.decoder.depth=1"),
    ),
    (rf"=lm:.*({PLAN})", Run(PRESET, says="held by each device between steps")),
    (r"=lm:(path/to/|exported)", Run(PRETRAINED)),
    (r"=lm:", Run(PRESET)),
    (r"shakespeare_char(\.py)?:", Run(LANGUAGE)),
    (r"=(configs/)?sums(\.py)?$", Run(f"{LANGUAGE} '--config.model.targets=()'")),
    (
        r"trm_sudoku(\.py)?:maze",
        Run(f"{PUZZLES} {OTHER.format('maze', 30)} --config.optim.warmup=1", says="exact_accuracy"),
    ),
    (r"trm_sudoku(\.py)?:extreme", Run(f"{PUZZLES} {GENERATED}", says="exact_accuracy_checked")),
    (
        r"trm_sudoku(\.py)?:(4x4|last)",
        Run(f"{PUZZLES} {GENERATED} --config.optim.warmup=1", says="exact_accuracy"),
    ),
    (r"trm_sudoku(\.py)?:", Run(PUZZLES)),
    (r"giblet(\.py)?:", Run(GIBLET)),
    (
        r"higgs(\.py)?:path/to/weights …",
        Run(
            f"{HIGGS} --config.data.manifest=manifest.json"
            " --config.data.tokenizer=path/to/weights/tokenizer.json --config.data.codes=codes.npz"
            " --config.workdir=runs/higgs-table",
            instead=((" …", ""),),
        ),
    ),
    (r"higgs(\.py)?:(path/to/weights|merged)", Run(HIGGS)),
    # Looking back.
    (r"^jaxtrain detect ", Run("--batch=8")),
    (r"^jaxtrain embed ", Run("--batch=8", says=r"[1-9]\d* recordings \(0 unreadable\)")),
    (
        r"^jaxtrain benchmark birdset ",
        Run("--batch=8 --draws=20", says=r"BirdSet HSN, 12 segments(.*\n)+.*cmAP \d"),
    ),
    (
        r"^jaxtrain benchmark esc10 ",
        Run("--batch=8 --draws=20", says=r"esc10, 400 clips(.*\n)+.*linear +accuracy \d"),
    ),
    (
        r"^jaxtrain export \S+ --push",
        Why("it needs an account of the Hub; tests/commands/test_export.py pushes to a stand-in"),
    ),
    (
        r"^jaxtrain export runs/xcm --format timm",
        Run(leaves=("xcm-timm/model.safetensors", "xcm-timm/example.py")),
    ),
    (
        r"^jaxtrain export runs/xcm --format onnx",
        Run(leaves=("xcm-onnx/model.onnx", "xcm-onnx/example_onnx.py")),
    ),
    (r"^jaxtrain probe ", Run(says="(?i)linear probe|linear")),
    # they differ, and the command says so
    (r"^jaxtrain checkpoint diff ", Run(code=1, says=r"encoder/")),
    (r"^jaxtrain checkpoint inspect ", Run(says=r"encoder/blocks/")),
    (r"^jaxtrain checkpoint verify ", Run(says=r"checkpoints/1")),
    (
        r"^jaxtrain export .*encoder",
        Run(leaves=("xcm-encoder/model.safetensors", "xcm-encoder/example.py")),
    ),
    (
        r"^jaxtrain fit .*answers\.csv",
        Why("people make its table; tests/workloads/bird/test_fit.py answers and fits"),
    ),
    (
        r"^jaxtrain review ",
        Why(
            "it serves a page until it is ended; tests/workloads/bird/test_review.py uses it in a"
            " browser"
        ),
    ),
    (r"^jaxtrain (fit|search) ", Run()),
    (
        r"^jaxtrain generate ",
        Run(
            says="the wren sings",
            instead=(("--tokens 32", "--tokens 8"),),
        ),
    ),
    (
        r"^jaxtrain predict ",
        Why("it needs the mask of real scans; tests/workloads/test_predict.py makes one"),
    ),
    (
        r"^jaxtrain solve .*--curve",
        Run("--batch 8", says="by_check"),
    ),
    (r"^jaxtrain solve ", Run(says="8 boards")),
    (r"^jaxtrain (export|checkpoint) ", Run()),
    (r"^jaxtrain runs", Run(says="xcm")),
    (
        r"^jaxtrain profile |metrics\.profile",
        Why("it needs a run that trains; tests/test_train.py asks one"),
    ),
    (
        r"^jaxtrain --workload my_workload",
        Why("it needs the files of the page; tests/test_docs.py runs it"),
    ),
    (r"^jaxtrain watch ", Why("it serves until Ctrl-C; tests/report/test_watch.py asks one")),
    (r"^jaxtrain metrics ", Run()),
    (r"^jaxtrain report ", Run()),
    (r"^jaxtrain lora-to-peft runs/higgs", Run(leaves=("adapters/adapter_model.safetensors",))),
    (r"^jaxtrain generate-audio ", Run("--seconds=0.4 --each=1", leaves=("played/*.wav",))),
)


class Command(NamedTuple):
    """A command as a page shows it."""

    page: str
    text: str
    before: str = ""  # lines of its block that set variables

    @property
    def name(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def rule(self) -> Run | Why | None:
        return next((rule for pattern, rule in RULES if re.search(pattern, self.text)), None)

    def line(self) -> str:
        """The command as it is typed: with the rule's arguments, and with small data in place of
        the docs' paths."""
        rule, text = self.rule, self.text
        assert isinstance(rule, Run)
        for old, new in rule.instead:
            text = text.replace(old, new)
        if (at := text.find(" -- ")) >= 0:  # the rest is another program's
            text = f"{text[:at]} {rule.more}{text[at:]}"
        else:
            text = f"{text} {rule.more}"
        for old, new in PLACES.items():
            text = text.replace(old, new)
        before = self.before
        for old, new in PLACES.items():
            before = before.replace(old, new)
        return f"{before}\n{text}" if before else text


STARTS = re.compile(
    r"(jaxtrain|python|make|pip|pytest|source|docker|kubectl|tools/\S+\.sh|tests/\S+\.sh)(\s|$)"
    r"|[A-Z_]+=\S+"
    r" .*(python|jaxtrain)"
)
INLINE = re.compile(
    r"(jaxtrain|make|python -m|python tools/|pytest|tools/\S+\.sh|tests/\S+\.sh|source|pip)(\s.*)?"
)


def shown() -> tuple[Command, ...]:
    """List every command once, in the order of the pages."""
    first: dict[str, Command] = {}
    for command in shown_on_each_page():
        first.setdefault(f"{command.before}\n{command.text}", command)
    return tuple(first.values())


@functools.cache
def shown_on_each_page() -> tuple[Command, ...]:
    """List the commands of each page once, in the order of the pages."""
    found: dict[Command, None] = {}
    for page in PAGES:
        text = page.read_text()
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
            if language in ("", "bash", "sh"):
                _add(found, page, block.replace("\\\n", " ").splitlines())
        rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        codes = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", rest)]
        _add(found, page, [code for code in codes if INLINE.fullmatch(code)])
    for file in CONFIGS:
        lines = (
            (ast.get_docstring(ast.parse(file.read_text()), clean=False) or "")
            .replace("\\\n", " ")
            .splitlines()
        )
        _add(found, file, [line.strip() for line in lines if line.startswith("    ")])
    return tuple(found)


def _add(found: dict[Command, None], page: pathlib.Path, lines: list[str]) -> None:
    before = ""
    for line in lines:
        text = " ".join(re.sub(r"\s+#\s.*$|\s{2,}\(.*$", "", line).split())
        if re.match(r"[a-z_]+=\"", text):
            before = f"{before}\n{text}".strip()
        elif STARTS.match(text):
            found[Command(str(page.relative_to(ROOT)), text, before)] = None


def start(folder: pathlib.Path) -> None:
    """Make ``folder`` a reader's folder, with the checkout's folders and data, unless it is one
    already."""
    if (folder / "configs").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "tests.docs_data", str(folder)], cwd=ROOT, check=True)
    for name in ("tools", "tests", "docs", "configs"):
        (folder / name).symlink_to(ROOT / name)


def run(command: Command, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Type a command in ``folder``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    cache = {k: v for k, v in os.environ.items() if k in KEEPS_PROGRAMS}
    n_devices = 8 if "mesh.fsdp=8" in command.text else 1
    environment = (
        inherited
        | cache
        | {
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": (f"{SOON} --xla_force_host_platform_device_count={n_devices}"),
            "JAXTRAIN_CACHE": str(folder / "cache"),
        }
    )
    script = f"set -euo pipefail\nshopt -s expand_aliases\n{command.line()}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )


def lacks(command: Command, done: subprocess.CompletedProcess, folder: pathlib.Path) -> str:
    """Name the first thing that a reader of the command would miss. It is empty if all is as the
    rule says and as every page promises.

    A run reports that it has ended, its files exist, and they have the loss of its last step. The
    path of --out exists, and --help prints a usage.
    """
    rule, text, output = command.rule, command.line(), f"{done.stdout}{done.stderr}"
    assert isinstance(rule, Run)
    if done.returncode != rule.code:
        return f"code {done.returncode}"
    if "Traceback (most recent call last)" in output:
        return "a traceback"
    if not re.search(rule.says, output):
        return f"no {rule.says!r} in its output"
    if text.split("--")[-1].strip() == "help":
        return "" if "usage: " in done.stdout else "no usage"
    paths = [*rule.leaves, *re.findall(r"--out[ =](\S+)", text)]
    if re.search(
        r"^(?:[A-Z_]+=\S+ )?jaxtrain train |jaxtrain\.main ", text, re.M
    ) and not re.search(r"--(plan|explain)\b", text):
        left = re.search(
            r"the run has ended; it left\n((?:  .*\n)+)next\n((?:  .*(?:\n|$))+)", output
        )
        if not left:
            return "the last lines of a run"
        found = dict(line.strip().split(": ", 1) for line in left[1].splitlines())
        paths += found.values()
        records = [
            json.loads(x)
            for path in paths
            if path.endswith("metrics.jsonl")
            for x in (folder / path).open()
        ]
        losses = [
            record["loss"]
            for record in records
            if record["split"] == "train" and record["step"] == 2
        ]
        if not losses or not all(map(math.isfinite, losses)):
            return f"the loss of step 2: {losses}"
    missing = [
        path
        for path in paths
        if not any(x.is_file() or any(x.iterdir()) for x in folder.glob(path))
    ]
    return f"nothing at {missing}" if missing else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="commands whose text, or page, matches"
    )
    parser.add_argument("--quick", action="store_true", help="those that take seconds")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    start(folder)
    done = folder / "passed.txt"
    passed = set(done.read_text().splitlines()) if done.exists() else set()
    failures = 0
    for command in shown():
        rule = command.rule
        if (
            isinstance(rule, Why)
            or (args.quick and rule and not rule.quick)
            or not re.search(args.only, command.name)
        ):
            continue
        if rule is None or command.name in passed:
            print(
                f"{'no rule' if rule is None else 'passed before':>13}  {command.name}", flush=True
            )
            failures += rule is None
            continue
        began = time.monotonic()
        ended = run(command, folder)
        missing = lacks(command, ended, folder)
        print(
            f"{'failed' if missing else 'passed':>13}  {command.name} "
            f" ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        if not missing:
            with done.open("a") as file:
                file.write(f"{command.name}\n")
        else:
            failures += 1
            print(
                f"{missing}\n{command.line()}\n{ended.stdout[-1500:]}{ended.stderr[-3000:]}",
                flush=True,
            )
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
