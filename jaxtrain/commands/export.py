"""Write a checkpoint as safetensors for Hugging Face, or make a checkpoint of safetensors.

    jaxtrain export RUN [--step N] [--ema] [--only REGEX] [--dtype bf16] [--shard-size 5GB]
        --out DIR
    jaxtrain export DIR --push OWNER/NAME
    jaxtrain export --reverse DIR --out RUN

    jaxtrain export runs/xcm --ema --only '^encoder/' --out xcm-encoder

    DIR/
      model.safetensors, or model-00001-of-0000N.safetensors …
                                        at most --shard-size each (a larger array has one to itself)
      model.safetensors.index.json      which file holds which name
      config.json                       the run's resolved config, or the workload's own
      README.md                         model card: the model, its use, its last metrics, its config
      jaxtrain.json  the parameter of each name, the step and the run's config, for --reverse
      SHA256SUMS                        of all of these: sha256sum --check SHA256SUMS

One process on a CPU is enough for a checkpoint of any mesh. Two exports of one step are equal byte
for byte. DIR appears whole or not at all. Of a run with adapters (config.lora) the merged weights
are exported; `jaxtrain lora-to-peft` writes the adapters alone. They are merged with the exact
weights that the run froze, which its checkpoints record by a digest. If these are gone or differ,
nothing is exported. An address (gs://…) is read only if --base names it.
If --only leaves out a parameter that a model needs, the card says so, and names no library, example
or metric. --reverse makes a workdir with one step of weights, marked as such, to warm-start from.

--push uploads DIR to the Hugging Face Hub in one commit, by the account that `hf auth login`
stored. Weights that are there already are not sent again, so that the same command resumes an
upload. With --private a new model is seen by its owner alone.

--format writes the folder for another program, in one of the workload's own formats.
"""

import argparse
import re
import time
from collections.abc import Sequence

from jaxtrain import workload
from jaxtrain.commands import arguments
from loaders.io import machine

DTYPES = ("f32", "f16", "bf16")
UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}  # [bytes] of a size


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    formats = (workload.of(name).formats_help for name in workload.shipped())
    parser = arguments.Parser("jaxtrain export", "\n".join([__doc__ or "", *filter(None, formats)]))
    arguments.add_run(parser, ema=True, nargs="?")
    parser.add_argument(
        "--reverse", metavar="DIR", help="make a checkpoint of this folder of safetensors instead"
    )
    parser.add_argument("--out", type=arguments.out_folder, help="the folder to make")
    parser.add_argument(
        "--only",
        type=_regex,
        default="",
        metavar="REGEX",
        help="parameters whose path matches: ^encoder/",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="round floating-point arrays to this; default: as they are"
    )
    parser.add_argument(
        "--shard-size", type=_size, default="5GB", help="largest file; default: 5GB"
    )
    arguments.add_base(parser)
    text = "a format of the run's workload; may be given twice"
    parser.add_argument("--format", action="append", default=[], metavar="NAME", help=text)
    parser.add_argument(
        "--license",
        type=_license,
        metavar="ID",
        help="of the weights, for the card: apache-2.0, cc-by-4.0, …",
    )
    parser.add_argument(
        "--dataset",
        type=_dataset,
        action="append",
        default=[],
        metavar="OWNER/NAME",
        help="on the Hub, that it was trained on, for the card; may be given twice",
    )
    text = "upload it to the Hugging Face Hub; without --out RUN is DIR itself"
    parser.add_argument("--push", metavar="OWNER/NAME", help=text)
    parser.add_argument(
        "--private",
        action="store_true",
        help="with --push: a model that is new is seen by its owner alone",
    )
    arguments.add_workload(parser)
    args = parser.parse_args(argv)
    if (args.run is None) == (args.reverse is None):
        parser.error("give either RUN or --reverse DIR")
    if not args.out and (args.reverse or not args.push):
        parser.error("the following arguments are required: --out")
    if args.push and args.reverse:
        parser.error("--push uploads an export, and --reverse makes none; omit one of them")
    if args.format and (args.reverse or not args.out):
        parser.error("--format belongs to an export of RUN to --out DIR")
    if args.private and not args.push:
        parser.error("--private belongs to --push")
    problem = _missing_package(args)
    if problem:
        arguments.report(problem)
        return arguments.USER_ERROR
    return _export(args)


def _missing_package(args: argparse.Namespace) -> str:
    """Return the error for the first package that an option needs and that is missing, or ""."""
    for name in args.format:
        for shipped in workload.shipped():
            package = workload.of(shipped).needs.get(name)
            if package:
                problem = arguments.missing(package, f"pip install 'jaxtrain[{package}]'")
                if problem:
                    return f"--format {name}: {problem}"
    if args.push:
        problem = arguments.missing("huggingface_hub", "pip install huggingface_hub")
        if problem:
            return f"--push: {problem}"
    return ""


def _export(args: argparse.Namespace) -> int:
    from jaxtrain.arrays import hub, safetensors

    began = time.perf_counter()
    if not args.out:
        print(hub.push(args.run, args.push, private=args.private))
        return 0
    if args.reverse:
        line = safetensors.reverse(args.reverse, args.out)
    else:
        options = safetensors.Options(
            step=args.step,
            ema=args.ema,
            only=args.only,
            dtype=safetensors.SHORT[args.dtype] if args.dtype else None,
            shard_size=args.shard_size,
            workload=args.workload,
            base=args.base,
            formats=args.format,
            license=args.license or "",
            datasets=args.dataset,
        )
        line = safetensors.export(args.run, args.out, options)
    peak = machine.peak_memory()
    print(
        f"{line}; {time.perf_counter() - began:.1f} s, at most {peak / 1e6:.0f} MB of host memory"
    )
    if args.push:
        print(hub.push(args.out, args.push, private=args.private))
    return 0


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a regular expression: {error}"
        ) from error
    return text


def _license(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,63}", text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no license; expected an id such as apache-2.0, mit, cc-by-nc-4.0 or"
            " other"
        )
    return text


def _dataset(text: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no dataset; expected its id on the Hub, OWNER/NAME"
        )
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]?)B?", text.strip())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected for example 5GB or 500MB"
        )
    return size
