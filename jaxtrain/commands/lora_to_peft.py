"""Writes the adapters of a run with config.lora in peft's format.

    jaxtrain lora-to-peft RUN [--step N] [--ema] [--base SOURCE] --out DIR

    jaxtrain lora-to-peft runs/higgs --out adapters

    DIR/
      adapter_model.safetensors     base_model.model.<module>.lora_A.weight [rank, in] and
                                    .lora_B.weight [out, rank] of each adapted matrix of each layer,
                                    and .weight of a module that was trained itself
      adapter_config.json           rank, alpha, the modules that are adapted (target_modules) or
                                    trained themselves (modules_to_save), and the weights that they
                                    belong to
    DIR-base/                       these weights for transformers, if they are a run's: --base
                                    names an export of it in their place

This works for workloads whose matrices are exported as (out, in) under names that end in
".weight". A trained parameter that peft has no place for is an error. `jaxtrain export` writes the
merged weights of such a run.
"""

from collections.abc import Sequence

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain lora-to-peft", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument(
        "--out", required=True, type=arguments.out_folder, help="the folder to make"
    )
    arguments.add_base(parser)
    arguments.add_workload(parser)
    args = parser.parse_args(argv)

    from jaxtrain.arrays import peft

    print(
        peft.export(
            args.run, args.out, step=args.step, ema=args.ema, named=args.workload, base=args.base
        )
    )
    return 0
