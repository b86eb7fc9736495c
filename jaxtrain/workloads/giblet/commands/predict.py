"""Predicts the fMRI of a film with a trained autoencoder, as NIfTI in the scans' own space.

    jaxtrain predict RUN FOLDER --out FILE.nii.gz [--correlation FILE.nii.gz]

    jaxtrain predict runs/giblet film --out predicted.nii.gz --correlation r.nii.gz

RUN is a run of jaxtrain.workloads.giblet: its workdir, a step directory of it, or a folder of
`jaxtrain export`. FOLDER is one of `jaxtrain prepare-giblet`: whose film is shown. FILE holds a
volume for each of the film's, z-scored as the training data, with the affine of FOLDER's
mask.nii.gz. Its --correlation is Pearson's r of each voxel over the volumes, between the prediction
and the mean of FOLDER's viewers. After an interruption, also by a full disk, the same command
resumes after the last finished volume.
"""

import argparse
from collections.abc import Sequence

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain predict", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument("folder", metavar="FOLDER", help="of `jaxtrain prepare-giblet`")
    parser.add_argument(
        "--out",
        required=True,
        type=arguments.out_file,
        metavar="FILE",
        help="the NIfTI to write: .nii or .nii.gz",
    )
    parser.add_argument(
        "--correlation", type=arguments.out_file, metavar="FILE", help="write r of each voxel, too"
    )
    parser.add_argument(
        "--mask",
        default="",
        metavar="FOLDER",
        help="with the mask.nii.gz of the voxels; default: FOLDER",
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="links in FOLDER may lead out of it"
    )
    parser.add_argument(
        "--batch",
        type=arguments.positive,
        default=16,
        help="volumes computed together; default: 16",
    )
    args = parser.parse_args(argv)
    for path in (args.out, args.correlation):
        if path and not path.name.endswith((".nii", ".nii.gz")):
            parser.error(f"{path} is no name of a NIfTI; end it in .nii or .nii.gz")
    if args.correlation == args.out:
        parser.error(f"--out and --correlation are the same file, {args.out}; name another")

    return _predict(args)


def _predict(args: argparse.Namespace) -> int:
    import numpy as np

    from jaxtrain.parallel import cluster
    from jaxtrain.workloads.giblet import predict

    cluster.start_jax()
    links = args.follow_links
    predictor = predict.load(args.run, args.folder, step=args.step, ema=args.ema, links=links)
    mask = args.mask or args.folder
    brain = predict.read_brain(mask, predictor.model.n_voxels, links=links)
    n, r = predict.write(predictor, brain, args.out, batch=args.batch)
    if args.correlation:
        predict.write_map(brain, r, args.correlation)
    mean_r = r.mean()
    high_r = np.quantile(r, 0.9)
    print(
        f"{args.out}: {n} volumes of {len(r)} voxels; r with the viewers' mean: {mean_r:.3f} on "
        f"average, {high_r:.3f} at the 90 % quantile"
    )
    return 0
