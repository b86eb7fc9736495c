"""From a loader's rows to sharded arrays: the rows of each process, their devices, and the thread
that runs ahead."""

import gc
import queue
import threading
import types
import weakref

import jax
import numpy as np
import pytest

from jaxtrain.data import feed
from jaxtrain.parallel.layout import make_layout, make_mesh
from loaders.base import Rows

BATCH = 16
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8), (2, 1, 4)]


def plan(sizes, axes=("batch", None)):
    layout = make_layout(make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), {})
    return {
        "x": jax.ShapeDtypeStruct(
            (BATCH, 4), np.float32, sharding=layout.sharding(axes, (BATCH, 4))
        ),
        "label": jax.ShapeDtypeStruct(
            (BATCH,), np.int32, sharding=layout.sharding(axes[:1], (BATCH,))
        ),
    }


def aligned(array):
    """A copy that starts at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def whole(position):
    rng = np.random.default_rng(position)
    return {
        "x": rng.normal(size=(BATCH, 4)).astype("f4"),
        "label": rng.integers(0, 9, BATCH, dtype="i4"),
    }


def host_batch(position, rows):
    return {
        name: [aligned(x[start:stop]) for start, stop in rows.ranges]
        for name, x in whole(position).items()
    }


@pytest.mark.parametrize("sizes", MESHES)
def test_a_process_with_all_devices_reads_every_row_once(sizes):
    rows = feed.rows_for(plan(sizes))
    assert rows.batch == BATCH
    assert [i for start, stop in rows.ranges for i in range(start, stop)] == list(range(BATCH))
    assert len(rows.ranges) == sizes[0] * sizes[1]  # devices along the model axis share their rows


def test_a_process_reads_what_its_devices_hold():
    """The process has half of the devices, as if a model axis spanned two hosts: both halves hold
    the same rows."""

    def rows(sizes, devices):
        def part(sharding):
            def mine(shape):
                return {
                    d: i for d, i in sharding.devices_indices_map(shape).items() if d in devices
                }  # noqa: E731

            return types.SimpleNamespace(addressable_devices_indices_map=mine)

        fields = {
            n: types.SimpleNamespace(shape=x.shape, sharding=part(x.sharding))
            for n, x in plan(sizes).items()
        }
        return feed.rows_for(fields).ranges

    devices = jax.devices()
    assert rows((1, 2, 4), devices[::4]) == ((0, 8), (8, 16))
    assert rows((1, 2, 4), devices[:4]) == rows((1, 2, 4), devices[1:3]) == ((0, 8),)
    assert rows((8, 1, 1), devices[6:]) == ((12, 14), (14, 16))


def test_all_rows_are_read_in_order_on_any_mesh_with_any_number_of_processes():
    """Random mesh shapes over 8 devices, dealt to 1, 2, 4 or 8 processes in order or at random.

    Together the processes read the batch of a single process. Each reads exactly the rows of its
    devices, in order.
    """
    rng = np.random.default_rng(0)
    shapes = [(a, b, 8 // (a * b)) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= 8]
    batch = whole(5)["x"]
    for _ in range(60):
        sizes = shapes[rng.integers(len(shapes))]
        fields = plan(sizes)
        devices = list(fields["x"].sharding.device_set)
        devices.sort(key=lambda d: d.id)
        order = rng.permutation(8) if rng.random() < 0.5 else np.arange(8)
        read = {}
        for part in np.split(order, 2 ** rng.integers(4)):
            mine = {devices[i] for i in part}
            local = {
                name: types.SimpleNamespace(
                    shape=x.shape,
                    sharding=types.SimpleNamespace(
                        addressable_devices_indices_map=lambda shape, x=x, mine=mine: {
                            d: i
                            for d, i in x.sharding.devices_indices_map(shape).items()
                            if d in mine
                        }
                    ),
                )
                for name, x in fields.items()
            }
            rows = [i for start, stop in feed.rows_for(local).ranges for i in range(start, stop)]
            held = {
                i
                for d, index in fields["x"].sharding.devices_indices_map((BATCH, 4)).items()
                if d in mine
                for i in range(*index[0].indices(BATCH))
            }
            assert rows == sorted(held), (sizes, part)
            read |= {i: batch[i] for i in rows}
        np.testing.assert_array_equal(np.stack([read[i] for i in sorted(read)]), batch)


def test_fields_must_be_split_alike():
    odd = plan((8, 1, 1)) | {"other": plan((4, 1, 2))["label"]}
    with pytest.raises(ValueError, match="other"):
        feed.rows_for(odd)


@pytest.mark.parametrize("sizes", MESHES)
def test_rows_land_in_their_place(sizes):
    batch = plan(sizes)
    rows = feed.rows_for(batch)
    arrays = feed.put(host_batch(3, rows), batch, rows)
    for name, expected in whole(3).items():
        assert (arrays[name].sharding, arrays[name].dtype) == (
            batch[name].sharding,
            batch[name].dtype,
        )
        np.testing.assert_array_equal(arrays[name], expected)
        for shard in arrays[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_a_field_may_be_split_in_other_dimensions_too():
    batch = plan((2, 2, 2), ("batch", "mlp"))
    rows = feed.rows_for(batch)
    np.testing.assert_array_equal(feed.put(host_batch(0, rows), batch, rows)["x"], whole(0)["x"])


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_aligned_rows_are_not_copied_on_a_cpu(sizes):
    batch = plan(sizes)
    rows = feed.rows_for(batch)
    host = host_batch(0, rows)
    arrays = feed.put(host, batch, rows)
    for name, parts in host.items():
        own = {part.ctypes.data for part in parts}
        used = {shard.data.unsafe_buffer_pointer() for shard in arrays[name].addressable_shards}
        assert own <= used  # if devices share rows, the others hold copies


class Numbers:
    """A loader of batches 1, 2, …. After ``end`` batches it raises StopIteration, or ``error`` if
    one is given."""

    def __init__(self, rows, *, end=None, error=None):
        self.rows, self.end, self.error = rows, end, error
        self.made, self.closed = queue.Queue(), threading.Event()
        self.position = 0

    def __next__(self):
        if self.position == self.end:
            if self.error:
                raise self.error
            if self.error is None:
                raise StopIteration
            self.closed.wait(30)  # a loader that waits for data until it is closed
            raise StopIteration
        self.position += 1
        self.made.put(self.position)
        return self.position, host_batch(self.position, self.rows)

    def close(self):
        self.closed.set()


def make_feed(depth=2, **loader):
    batch = plan((2, 2, 2))
    rows = feed.rows_for(batch)
    numbers = Numbers(rows, **loader)
    return numbers, feed.Feed(numbers, batch, rows, depth=depth)


def feed_threads():
    return [t for t in threading.enumerate() if t.name == "feed"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not feed_threads()


def test_batches_come_in_order_with_their_position():
    _, stream = make_feed(end=5)
    for expected, (position, batch) in enumerate(stream, start=1):
        assert position == expected
        np.testing.assert_array_equal(batch["x"], whole(position)["x"])
    assert expected == 5
    with pytest.raises(StopIteration):  # it is raised again, instead of waiting for ever
        next(stream)
    assert stream.waited > 0
    stream.close()


def test_the_next_batch_is_on_the_devices_while_a_step_computes():
    """The loop starts a step, and then makes and copies the next batch before that step is done."""
    _, stream = make_feed()

    done = threading.Event()

    def wait(x):
        done.wait(60)
        return x

    @jax.jit
    def step(x):
        total = x.sum()
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(total.shape, total.dtype), total)

    _, batch = next(stream)
    out = step(batch["x"])
    _, following = next(stream)
    jax.block_until_ready(following)
    assert not out.is_ready(), "the copy waited for the step"
    done.set()
    out.block_until_ready()
    stream.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_runs_ahead_so_far_and_no_further(depth):
    numbers, stream = make_feed(depth=depth)
    for i in range(depth + 1):  # the waiting batches, and one that is made and has no room yet
        assert numbers.made.get(timeout=30) == i + 1
    with pytest.raises(queue.Empty):
        numbers.made.get(timeout=0.2)
    assert next(stream)[0] == 1
    assert numbers.made.get(timeout=30) == depth + 2
    stream.close()


def test_an_error_of_the_loader_reaches_the_consumer_after_the_good_batches():
    _, stream = make_feed(end=2, error=OSError("disk gone"))
    assert [next(stream)[0], next(stream)[0]] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(stream)
    stream.close()


def test_a_batch_that_does_not_fit_is_an_error_of_the_consumer():
    batch = plan((2, 2, 2))
    stream = feed.Feed(Numbers(Rows(BATCH, ((0, BATCH),))), batch, Rows(BATCH, ((0, BATCH),)))
    with pytest.raises(KeyError):
        next(stream)
    stream.close()


def test_close_ends_a_thread_that_has_no_room():
    numbers, stream = make_feed(depth=1)
    numbers.made.get(timeout=30), numbers.made.get(timeout=30)
    stream.close()
    assert numbers.closed.is_set()
    with pytest.raises(StopIteration):
        next(stream)


def test_close_ends_a_loader_that_waits_and_lets_a_waiting_consumer_go():
    _, stream = make_feed(end=1, error=False)
    _, batch = next(stream)
    rest = []
    consumer = threading.Thread(target=lambda: rest.extend(stream))
    consumer.start()
    stream.close()
    consumer.join(30)
    assert not consumer.is_alive() and not rest
    # the batch that was returned stays valid
    np.testing.assert_array_equal(batch["x"], whole(1)["x"])


def test_a_slab_is_free_when_the_batch_is_gone():
    """Only then may the loader use its memory again: on a CPU the device arrays alias it."""
    batch = plan((8, 1, 1))
    rows = feed.rows_for(batch)
    host = host_batch(0, rows)
    owners = [weakref.ref(part.base) for part in host["x"]]
    arrays = feed.put(host, batch, rows)
    del host
    assert all(owner() is not None for owner in owners)
    np.testing.assert_array_equal(arrays["x"], whole(0)["x"])
    del arrays
    gc.collect()
    assert all(owner() is None for owner in owners)
