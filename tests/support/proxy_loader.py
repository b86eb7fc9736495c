"""A loader in front of another, with the faults that a test's environment asks for.

PROXIED            the module of the loader behind it; default: loaders.audio.spectrogram
IDS                a log of its batches, a JSON line for each range of rows
PAUSE              seconds that each training batch takes longer
PAUSE_TEST         seconds that each batch of an evaluation takes longer, once it is in the log
STARTING           a file that is made when a loader is opened, which then takes five minutes
KILL_AT, KILL_AFTER, KILL_SIGNAL   a training position, a folder that is waited for there, and the
                                   signal; default: SIGKILL
STALL_AT, STALLED  a training position, and a file that is made there, after which no batch comes
POISON             training positions, by commas, whose last row is not a number
"""

import importlib
import json
import os
import signal
import time

import numpy as np

proxied = importlib.import_module(os.environ.get("PROXIED", "loaders.audio.spectrogram"))
Config, dataset_info, element_spec = proxied.Config, proxied.dataset_info, proxied.element_spec


class Proxy:
    def __init__(self, loader, split, rows):
        self._loader, self._split, self._rows = loader, split, rows

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def __next__(self):
        position, batch = next(self._loader)
        if self._split == "train":
            batch = disturbed(position, batch)
        if "index" in batch and "IDS" in os.environ:
            columns = [batch[name] for name in ("index", "weight", "epoch") if name in batch]
            with open(os.environ["IDS"], "a") as file:
                for rows, *values in zip(self._rows.ranges, *columns, strict=True):
                    file.write(
                        json.dumps([self._split, position, rows, *(x.tolist() for x in values)])
                        + "\n"
                    )
        if self._split == "test":
            time.sleep(float(os.environ.get("PAUSE_TEST", 0)))
        return position, batch


def disturbed(position, batch):
    time.sleep(float(os.environ.get("PAUSE", 0)))
    if position == int(os.environ.get("STALL_AT", 0)):
        open(os.environ["STALLED"], "w").close()
        time.sleep(300)
    if position >= int(os.environ.get("KILL_AT", position + 1)):
        while not os.path.isdir(os.environ["KILL_AFTER"]):
            time.sleep(0.01)
        del os.environ["KILL_AT"]  # a signal that a run survives is sent once
        os.kill(os.getpid(), int(os.environ.get("KILL_SIGNAL", signal.SIGKILL)))
    if str(position) in os.environ.get("POISON", "").split(","):
        # Only in the last shard of rows: one device sees it, and all must skip.
        name = "spectrogram" if "spectrogram" in batch else "x"
        parts = [np.array(x) for x in batch[name]]
        parts[-1][-1] = np.nan
        return {**batch, name: parts}
    return batch


def make_loader(config, *, split, rows, seed):
    if "STARTING" in os.environ:
        open(os.environ["STARTING"], "w").close()
        for _ in range(3_000):  # a signal that comes just before a sleep does not end that one
            time.sleep(0.1)
    return Proxy(proxied.make_loader(config, split=split, rows=rows, seed=seed), split, rows)
