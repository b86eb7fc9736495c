"""Continues prompts with a trained language model.

    jaxtrain generate RUN PROMPT… [--tokens 64] [--temperature 0.8] [--top-p 0.95] [--seeds 0 1 2]
    jaxtrain generate RUN --prompts FILE [--out FILE.jsonl]

    jaxtrain generate runs/shakespeare_char "ROMEO:" --tokens 100 --seeds 0 1

RUN is a run of jaxtrain.workloads.language: its workdir, a step directory of it, or a folder of
`jaxtrain export`. --prompts has a prompt a line, or JSON lines with "prompt". Each prompt is
continued once for each seed. A continuation follows from the prompt and its seed. --out gets a line
of JSON for each: prompt, seed, text, tokens, ended. Interrupted, by a full disk, too, the same
command resumes after the finished ones.
"""

import argparse
import functools
import json
from collections.abc import Sequence

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain generate", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to be continued")
    parser.add_argument(
        "--prompts", dest="file", default="", metavar="FILE", help="a prompt a line, or JSON lines"
    )
    parser.add_argument(
        "--out",
        type=arguments.out_file,
        metavar="FILE",
        help="write JSON lines instead of printing text",
    )
    parser.add_argument(
        "--tokens",
        type=arguments.positive,
        default=64,
        help="of a continuation, at most; default: 64",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token; default: 0.8"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="probability that drawn tokens add up to; default: 0.95",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="a continuation for each; default: 0",
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=16,
        help="continuations computed together; default: 16",
    )
    parser.add_argument(
        "--tokenizer", default="", help="a tokenizer.json, or bytes; default: the run's"
    )
    args = parser.parse_args(argv)
    if bool(args.prompts) == bool(args.file):
        parser.error("expected PROMPT… or --prompts FILE")
    if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        parser.error("--temperature must be at least 0, and --top-p in (0, 1]")
    if any(not 0 <= seed < 2**31 for seed in args.seeds):
        parser.error("--seeds must lie in 0 to 2^31 - 1")

    return _generate(args)


def _generate(args: argparse.Namespace) -> int:
    from jaxtrain.parallel import cluster
    from jaxtrain.workloads.language import generate
    from loaders.io import resumable

    cluster.start_jax()
    prompts = generate.read_prompts(args.file) if args.file else args.prompts
    writer = generate.load(args.run, step=args.step, ema=args.ema, tokenizer=args.tokenizer)
    continued = functools.partial(
        generate.generate,
        writer,
        prompts,
        tokens=args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seeds=args.seeds,
        batch=args.batch,
    )
    if not args.out:
        for continuation in continued():
            print(f"{continuation.prompt}{continuation.text}\n", flush=True)
        return 0
    made_of = (
        writer.name,
        *prompts,
        args.tokens,
        args.temperature,
        args.top_p,
        *args.seeds,
        args.batch,
    )
    with resumable.file(args.out, made_of) as file:
        for continuation in continued(first=file.n):
            line = json.dumps(continuation._asdict(), ensure_ascii=False)
            file.write(f"{line}\n".encode())
    print(f"{args.out}: {len(prompts) * len(args.seeds)} continuations of {len(prompts)} prompts")
    return 0
