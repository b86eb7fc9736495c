"""Bird-audio pretraining on XCL: 528,422 recordings, 484 GB; the recipe is that of configs/xcm.py.

    python -m jaxtrain.main --config=configs/xcl.py:/path/to/XCL        (or JAXTRAIN_XCL=/path/to/XCL)

On a network file system add --config.data.order=block: shards are then read in runs, ahead of the workers.
"""

import os
import runpy
from pathlib import Path

from ml_collections import ConfigDict

XCM = runpy.run_path(str(Path(__file__).with_name("xcm.py")))
BROKEN = (495640, 495763, 497541, 498645, 501254)  # recordings that no decoder reads, found by a scan of all


def get_config(path: str = "") -> ConfigDict:
    path = path or os.environ.get("JAXTRAIN_XCL", "")
    if not path:
        raise ValueError("no data path: use --config=configs/xcl.py:/path/to/XCL, or set JAXTRAIN_XCL")
    config = XCM["get_config"](path)
    config.data.exclude = BROKEN
    return config
