"""Detect classes in recordings of any length, as selection tables, label tracks, CSV, and scores.

    jaxtrain detect RUN RECORDING… --out DIR [--overlap S] [--threshold SCORE]

    jaxtrain detect runs/xcm recordings --out found --overlap 2.5 --threshold 0.4

RUN is a run of jaxtrain.workloads.bird: its workdir, a step directory of it, or a folder of
`jaxtrain export`. RECORDING is a file, a folder, an index of `jaxtrain index`, or a table or list
that names some. Each recording is cut into windows as long as the clips that the run was trained
on, with the last one at its end. Times and frequencies are those of the file, also if it is slower
than life (--time-expansion), and the time of day is that of life. Scores are softmax or sigmoid, as
the run was trained, or those of a head by `jaxtrain fit` (--model).

    DIR/detections.csv             BirdNET-Analyzer's columns, and the time of day if it is known
        raven/NAME.selections.txt  selection tables
        audacity/NAME.txt          label tracks
        recordings.csv             every recording, with its windows and detections
        scores/part-*.parquet      the scores of all windows, a column a class
        errors.csv                 unreadable recordings: the command continues, then exits with 1

Rerun the same command to resume after an interruption: the result has the same bytes. With another
--threshold or --min-duration only the tables are made again. Under srun or mpirun the
processes share the windows.
"""

import argparse
import fcntl
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands import arguments
from jaxtrain.workloads.bird import commands

if TYPE_CHECKING:  # JAX is not imported for the help of the command
    from jaxtrain.workloads.bird.inference.encoder import Model
    from jaxtrain.workloads.bird.inference.heads import Head
    from loaders.audio.spectrogram import Config


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain detect", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument(
        "recordings",
        metavar="RECORDING",
        nargs="+",
        help="files, folders, indexes, tables or lists of names",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_folder,
        metavar="DIR",
        help="folder to make or resume",
    )
    parser.add_argument(
        "--model", metavar="FILE", help="a head of `jaxtrain fit`, instead of the run's own"
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="S",
        help="of neighbouring windows; default: 0",
    )
    parser.add_argument(
        "--threshold",
        default="",
        metavar="SCORE",
        help="number, or table by class; default: --model's, 0.5",
    )
    parser.add_argument(
        "--classes",
        default="",
        metavar="NAMES",
        help="between commas, or a file, those with a comma in quotes; default: all",
    )
    parser.add_argument(
        "--min-duration",
        type=float,
        default=0.0,
        metavar="S",
        help="of a detection, at least; default: 0",
    )
    parser.add_argument(
        "--no-merge",
        action="store_true",
        help="a detection for each window, instead of one for neighbours",
    )
    parser.add_argument(
        "--root",
        default="",
        metavar="FOLDER",
        help="base of all names; default: the nearest folder above all",
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="links in it may lead out of it"
    )
    parser.add_argument(
        "--names",
        default="",
        metavar="FILE",
        help="names of the run's classes in order, if it has none",
    )
    parser.add_argument(
        "--time-expansion",
        type=float,
        metavar="TIMES",
        help="times slower than life that recordings are (bats: often 10); default: the run's",
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=64,
        help="windows computed together; default: 64",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="that decode; default: one for each core"
    )
    commands.add_table_flags(
        parser.add_argument_group("tables that name recordings"), names=("file",)
    )
    return _detect(parser.parse_args(argv))


def _detect(args: argparse.Namespace) -> int:

    from jaxtrain.parallel import cluster, jax_options
    from jaxtrain.telemetry import console as console_lib
    from jaxtrain.workloads.bird.inference import InferenceError, detect, detections, encoder, heads

    membership = cluster.find()
    jax_options.see_only(membership.local_devices)
    commands.prepare_process()
    model = encoder.load(args.run, step=args.step, ema=args.ema)
    # The windows are its data, and the training data are not opened.
    changes: dict[str, Any] = {
        "threads": args.threads,
        "follow_links": args.follow_links,
        "label": "",
        "multilabel": False,
        "train": "",
        "test": "",
        "views": 1,
    }
    if args.time_expansion is not None:
        changes["time_expansion"] = args.time_expansion
    data = encoder.data_config(model, **changes)
    head = _head(args, model, data)
    classes = list(range(len(head.names)))
    if args.classes:
        names = detect.read_classes(args.classes, head.names)
        classes = sorted(set(heads.read_names(names, head.names, "--classes")))
    class_names = [head.names[i] for i in classes]
    fitted = None if head.thresholds is None else head.thresholds[classes]
    bounds = detections.thresholds(args.threshold, class_names, fitted)
    if not 0 <= args.min_duration < float("inf"):
        raise InferenceError(
            f"--min-duration is {args.min_duration}; it must be a number of seconds, at least 0"
        )
    note = _note if membership.process == 0 else lambda text: None
    windows, errors = encoder.cut_windows(
        args.recordings,
        data,
        overlap=args.overlap,
        root=args.root,
        links=args.follow_links,
        note=note,
        reading=commands.table_options(args),
    )
    data = encoder.data_config(model, **changes, audio_root=windows.root)
    parts, made_of = detect.prepare(
        model, head, windows, args.out, chosen=classes, batch=args.batch
    )
    console = console_lib.start_console(process=membership.process)
    try:
        timing = detect.score(
            model,
            head,
            data,
            parts,
            made_of,
            chosen=classes,
            share=(membership.process, membership.processes),
            progress=console.progress,
        )
    finally:
        console.finish()
    if timing["windows"]:
        recorded = windows.total * timing["windows"] / windows.n
        speed = recorded / timing["seconds"]
        print(
            f"{timing['windows']} windows, {recorded / 3600:.2f} h of recordings in"
            f" {timing['seconds']:.0f} s: {speed:.0f} × real time,"
            f" {timing['waiting']:.0%} of the time waiting for the loader"
        )
    if not detections.complete(parts):
        print(
            f"{args.out}: other processes have windows left; the last one to end writes the tables"
        )
        return 0
    highest = data.highest / data.time_expansion
    options = detections.Options(bounds, not args.no_merge, args.min_duration, (0.0, highest))
    # of processes that end together, one writes the tables
    with open(parts.folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        counts = detections.write(parts, options, errors)
    commands.show_errors(errors)
    n = len(windows.recordings)
    n_unreadable = counts["unreadable"]
    unreadable = f" ({n_unreadable} unreadable)" if n_unreadable else ""
    summary = errors.summary(f"{args.out}/errors.csv")
    print(
        f"{args.out}: {counts['detections']} detections in {n} recordings,"
        f" {windows.n} windows{unreadable}"
    )
    print(f"{n} recordings used, {counts['silent']} without detections; {summary}")
    return 1 if counts["errors"] else 0


def _head(args: argparse.Namespace, model: "Model", data: "Config") -> "Head":
    """Return the head of --model, or the run's own. Raises InferenceError."""
    from jaxtrain.workloads.bird.inference import detect, encoder, heads

    if not args.model:
        return detect.head_of(model, detect.read_classes(args.names))
    head = heads.read(args.model)
    heads.refuse_other(
        head,
        digest=model.digest,
        width=model.config.embed,
        front_end=data.settings | encoder.clips(data),
        run=model.name,
    )
    return head


def _note(text: str) -> None:
    print(text, file=sys.stderr)
