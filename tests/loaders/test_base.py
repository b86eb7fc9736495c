"""The loaders' base class: positions, ranges, buckets, the end of a split, reading ahead, and its
defaults."""

import threading

import numpy as np
import pytest

from loaders import order
from loaders.base import DataError, Field, Loader, Rows

BATCH, RANGES = 6, ((0, 2), (4, 6))
SCALAR = Field((), np.dtype(np.int32))


class Numbers(Loader):
    """Rows that are their own number in the run. Every other batch belongs to the larger bucket."""

    def __init__(self, *, train=True, n_batches=5, **options):
        small = {"number": SCALAR, "index": SCALAR}
        large = {**small, "wide": Field((3,), np.dtype(np.float32))}
        super().__init__(
            small,
            large,
            train=train,
            rows=Rows(BATCH, RANGES),
            seed=7,
            n_batches=n_batches,
            **options,
        )

    fingerprint = "digest"
    order = {"batch": BATCH}

    def bucket_at(self, position):
        return position % 2

    def _part(self, position, row):
        batch = self._empty(len(row), self.bucket_at(position))
        batch["number"][:] = position * BATCH + row
        return batch


class Plain(Numbers):
    bucket_at = Loader.bucket_at


def numbers(batch):
    return [x.tolist() for x in batch["number"]]


@pytest.mark.parametrize(
    "options", [{}, {"threads": 2, "ahead": 3}], ids=["asked for", "read ahead"]
)
def test_a_batch_is_a_function_of_its_position(options):
    loader = Numbers(**options)
    for start in (0, 40, 3):
        loader.seek(start)
        for position in range(start, start + 4):
            after, batch = next(loader)
            assert after == position + 1
            assert numbers(batch) == [[position * BATCH + i for i in range(*r)] for r in RANGES]
            assert set(batch) == set(loader.buckets[position % 2])
            assert (batch["index"][0] == -1).all(), "padding until a row is written"
    loader.close()
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize(
    "options", [{}, {"threads": 1, "ahead": 2}], ids=["asked for", "read ahead"]
)
def test_a_test_split_ends_and_begins_again(options):
    loader = Numbers(train=False, **options)
    assert [after for after, _ in loader] == [1, 2, 3, 4, 5]
    loader.seek(4)
    assert [after for after, _ in loader] == [5]
    loader.seek(9)
    assert list(loader) == [], "past its end there is nothing"
    assert list(Numbers(train=False, n_batches=0, **options)) == []
    loader.close()


def test_reading_ahead_is_done_by_other_threads():
    names = set()

    class Watched(Numbers):
        def _part(self, position, row):
            names.add(threading.current_thread().name)
            return super()._part(position, row)

    loader = Watched(threads=2, ahead=3)
    for _ in range(8):
        next(loader)
    loader.close()
    assert threading.current_thread().name not in names


def test_methods_that_a_loader_may_leave_out_have_defaults():
    loader = Plain()
    assert loader.element_spec == loader.buckets[-1] and loader.bucket_at(3) == 0
    assert loader.population is None and loader.diagnostics() == {}
    assert loader.state(11) == {
        "position": 11,
        "seed": 7,
        "fingerprint": "digest",
        "order": {"batch": BATCH},
    }


def test_a_field_that_a_loader_does_not_make_is_named():
    class Short(Numbers):
        def _part(self, position, row):
            return {"number": row}

    with pytest.raises(DataError, match="Short made batch 0 without its field 'index'"):
        next(Short())


def test_a_loader_may_set_its_fingerprint_and_order_and_lacks_them_by_name():
    loader = Loader({"number": SCALAR}, train=True, rows=Rows(1, ((0, 1),)), seed=5, n_batches=1)
    with pytest.raises(AttributeError, match="fingerprint"):
        loader.state(3)
    loader.fingerprint, loader.order = "digest", {"batch": 1}
    assert loader.state(3) == {
        "position": 3,
        "seed": 5,
        "fingerprint": "digest",
        "order": {"batch": 1},
    }


def test_epochs_draw_each_recording_once_and_once_ends():
    epoch, recording = order.epochs(3, 10, np.arange(35))
    assert epoch.tolist() == [i // 10 for i in range(35)]
    for e in range(3):
        np.testing.assert_array_equal(
            recording[epoch == e], order.permutation(3, e, 10, np.arange(10))
        )
    np.testing.assert_array_equal(order.epochs(3, 10, np.array([27, 4]))[1], recording[[27, 4]])
    there, recording = order.once(10, np.arange(7, 13))
    assert there.tolist() == [0, 1, 2] and set(recording.tolist()) < set(range(10))
    assert order.once(10, np.array([10, 11]))[1].size == 0
