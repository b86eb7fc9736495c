"""Bird-audio pretraining on XCL: 528,422 recordings, 484 GB; the recipe is that of configs/xcm.py.

    jaxtrain train --config=xcl:/path/to/XCL  (or JAXTRAIN_XCL=/path/to/XCL)

On a network file system add --config.data.order=block: shards are then read in runs, ahead of the
workers.
"""

import logging
import os

from ml_collections import config_dict

# its path is that of configs/, in a checkout or a wheel
from jaxtrain.configs import xcm  # type: ignore[attr-defined]

# recordings that no decoder reads, found by a scan of all
BROKEN = (495640, 495763, 497541, 498645, 501254)
ROWS = 528_422  # of the mirror whose rows these are


def get_config(path: str = "") -> config_dict.ConfigDict:
    path = path or os.environ.get("JAXTRAIN_XCL", "")
    if not path:  # which is reported with the config's other errors
        logging.getLogger("jaxtrain").warning(
            "no data path: use --config=xcl:/path/to/XCL, or set JAXTRAIN_XCL"
        )
    config = xcm.recipe(path)
    config.data.exclude = BROKEN
    config.data.exclude_of = ROWS
    return config
