"""One sequence of examples for 1, 2, 4 and 8 processes, whose number changes in the middle of a
run: packed, mixed and filtered rows of text, conversations with sound, and films.

Processes have the rows that the trainer gives them by their devices (`feed.rows_for`), on meshes
with and without a model axis. After each change they begin at the position of a checkpoint, some
batches before the last one that was read, as after a kill.
"""

import collections
import multiprocessing
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.data import feed
from loaders.base import Rows
from loaders.text.tokens import Source
from tests.support import chat, documents, films, order_reader
from tests.support.order_reader import Task

BATCH = 16
BATCHES = 12  # of a trial
MESHES = ((8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (2, 1, 4), (1, 1, 8), (4, 1, 2))
TRIALS = 13  # of each kind of data, in the slow part
TEXT, CHAT, FILM = "loaders.text.tokens", "loaders.chat.chat_audio", "loaders.film.multimodal"


def tokens(folder, **fields):
    """Documents of two sources, from which those without a prediction are left out."""
    for name, seed in (("a", 0), ("b", 1)):
        if not (folder / name).exists():
            documents.corpus(folder / name, n=120, seed=seed)
    sources = tuple(
        Source(str(folder / name), share=share) for name, share in (("a", 3.0), ("b", 1.0))
    )
    return TEXT, documents.config_of(folder / "a", sources=sources, ahead=3, **fields)


def conversations(folder):
    made = folder / "chat"
    made.mkdir()
    return CHAT, chat.corpus(made, n=40)


def film(folder):
    return FILM, films.make(folder / "film")


KINDS = {
    "packed and mixed": lambda folder: tokens(folder, documents=3),
    "mixed until one ends": lambda folder: tokens(folder, exhausted="stop", packing="concat"),
    "random windows": lambda folder: tokens(folder, packing="random"),
    "chat audio": conversations,
    "film": film,
}


class OfProcess(collections.namedtuple("OfProcess", "sharding devices")):
    """A sharding as one of several processes sees it, which has these devices."""

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.devices_indices_map(shape)
        return {device: index for device, index in indices.items() if device in self.devices}


def rows_of(mesh, processes):
    """The rows of each process, on 8 devices."""
    devices = jax.devices()[:8]
    grid = Mesh(np.array(devices).reshape(mesh), ("data", "fsdp", "model"))
    sharding = NamedSharding(grid, PartitionSpec(("data", "fsdp")))
    n = len(devices) // processes
    for i in range(processes):
        own = OfProcess(sharding, devices[i * n : (i + 1) * n])
        batch = {"x": collections.namedtuple("X", "sharding shape")(own, (BATCH,))}
        yield feed.rows_for(batch)


def follow(module, config, seed, read):
    """Read a run whose processes change three times. Returns the numbers of processes, and
    (position, row) -> digests."""
    draw = random.Random(seed)
    digests = collections.defaultdict(set)
    states = set()
    counts = []
    for start, stop in order_reader.segments(BATCHES, draw.sample(range(1, BATCHES), 3)):
        start = max(start - draw.randint(0, 2), 0)
        processes = draw.choice([n for n in (1, 2, 4, 8) if n not in counts[-1:]])
        counts.append(processes)
        ranges = rows_of(draw.choice(MESHES), processes)
        tasks = [Task(module, config, rows, start, stop) for rows in ranges]
        for found, state in read(tasks):
            states.add(str({**state, "position": None}))
            for place, digest in found.items():
                digests[place].add(digest)
    assert len(states) == 1, "a checkpoint of any of them is resumed by the others"
    return counts, digests


def is_one_sequence(module, config, seed, read):
    whole, _ = order_reader.read(Task(module, config, Rows(BATCH, ((0, BATCH),)), 0, BATCHES))
    assert len(set(whole.values())) > BATCH, "the rows differ"
    counts, digests = follow(module, config, seed, read)
    assert digests == {place: {digest} for place, digest in whole.items()}, (seed, counts)
    return counts


def test_packed_and_mixed_rows_are_the_same_for_any_number_of_processes(tmp_path):
    module, config = KINDS["packed and mixed"](tmp_path)
    is_one_sequence(module, config, 0, lambda tasks: map(order_reader.read, tasks))


@pytest.mark.slow
def test_sixty_trials_of_real_processes_read_one_sequence(tmp_path, record_property):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grain", "tests.support.order_reader", TEXT, CHAT, FILM])
    trials = 0
    counts = collections.Counter()
    with context.Pool(8, maxtasksperchild=1) as pool:
        for number, kind in enumerate(KINDS):
            folder = tmp_path / str(number)
            folder.mkdir()
            module, config = KINDS[kind](folder)
            for seed in range(TRIALS):
                read = lambda tasks: pool.map(order_reader.read, tasks, chunksize=1)  # noqa: E731
                counts.update(is_one_sequence(module, config, 100 * number + seed, read))
                trials += 1
    record_property("trials", trials)
    print(f"{trials} trials, starts by number of processes: {dict(sorted(counts.items()))}")
    assert trials >= 60 and set(counts) == {1, 2, 4, 8}
