"""Answers prompts with sound, by a trained audio language model.

    jaxtrain generate-audio RUN PROMPT … --out DIR [--each 4] [--temperature 0.9] [--top-k 50]

    jaxtrain generate-audio merged "a dog" "rain" --out played

RUN is a run of jaxtrain.workloads.audio_language: its workdir, a step directory of it, or a folder
of `jaxtrain export` (of a run with adapters the folder, which has them merged). Tokenizer, codec
and delay are those of the training, unless --tokenizer and --codec name others.

    DIR/000-0.npy      int16 [K, T]: the codes of prompt 0's first answer
    DIR/000-0.wav      decoded by a codec.npz (another codec's codes are only written)
    DIR/000-0.png      its log-mel spectrogram, low bands at the bottom
    DIR/answers.jsonl  {"prompt", "text", "file", "seconds"} of each answer

A prompt is a user's turn, which an assistant answers with a recording, or, with --text, with text
first. --temperature and --top-k take one number for all codebooks, or one for each.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain generate-audio", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument(
        "--out", required=True, type=arguments.out_folder, metavar="DIR", help="the folder to make"
    )
    parser.add_argument(
        "--each", type=arguments.positive, default=1, help="answers to each prompt; default: 1"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a recording, at most; default: 10"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0], help="default: 1")
    parser.add_argument("--top-k", type=int, nargs="+", default=[0], help="default: 0, all codes")
    parser.add_argument("--text", action="store_true", help="let the answer begin with text")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    parser.add_argument("--tokenizer", default="", help="a tokenizer.json; default: the run's")
    parser.add_argument(
        "--codec", default="", help="a codec.npz, or module:function; default: the run's"
    )
    args = parser.parse_args(argv)

    from jaxtrain.parallel import cluster
    from jaxtrain.workloads.audio_language import generate_audio
    from jaxtrain.workloads.audio_language.decoding import Streams

    cluster.start_jax()
    speaker = generate_audio.load(
        args.run, step=args.step, ema=args.ema, tokenizer=args.tokenizer, codec_path=args.codec
    )
    prompts: list[str] = []
    for prompt in args.prompts:
        prompts += [prompt] * args.each
    temperature = tuple(args.temperature)
    top_k = tuple(args.top_k)
    streams = Streams(temperature=temperature, top_k=top_k)
    answers = generate_audio.speak(
        speaker,
        prompts,
        seconds=args.seconds,
        streams=streams,
        seed=args.seed,
        text_first=args.text,
    )
    generate_audio.write(speaker, args.out, prompts, answers, args.each)
    return 0
