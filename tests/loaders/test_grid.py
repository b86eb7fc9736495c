"""Windows of recordings: where they lie, and which of them hold an event."""

import numpy as np
import pytest

from loaders.audio.recordings import grid


@pytest.mark.parametrize(
    ("seconds", "hop", "expected"),
    [
        (4.0, 5.0, [(0, 4)]),
        (5.0, 5.0, [(0, 5)]),
        (5.001, 5.0, [(0, 5.001)]),
        (10.24, 5.0, [(0, 5), (5, 10.24)]),
        (10.26, 5.0, [(0, 5), (5, 10), (5.26, 10.26)]),
        (12.0, 5.0, [(0, 5), (5, 10), (7, 12)]),
        (7.6, 2.5, [(0, 5), (2.5, 7.6)]),
        (18.0, 10.0, [(0, 5), (10, 15), (13, 18)]),
    ],
)
def test_the_last_window_is_no_twin_and_ends_with_the_recording(seconds, hop, expected):
    windows = grid.spans(seconds, 5.0, hop)
    assert windows == expected
    assert windows[-1][1] == seconds


@pytest.mark.parametrize(
    ("event", "holding"),
    [
        ((2.9, 3.1), [0, 1]),  # half in each
        ((2.9, 3.05), [0]),
        ((2.8, 3.14), [0, 1]),  # neither has a quarter of a second
        ((2.97, 3.1), [1]),
        ((2.8, 3.2), [0, 1]),
        ((2.9, 3.3), [1]),  # has enough of it
        ((1.0, 1.1), [0]),
        ((0.0, 9.0), [0, 1, 2]),
    ],
)
def test_an_event_is_in_a_window(event, holding):
    starts = np.arange(3) * 3.0
    assert np.flatnonzero(grid.holding(starts, starts + 3, event, 0.25)).tolist() == holding


def test_an_event_mostly_in_a_gap_is_in_no_window():
    starts = np.arange(3) * 6.0
    assert not grid.holding(starts, starts + 3, (2.9, 3.2), 0.25).any()
    assert not grid.holding(starts, starts + 3, (3.0, 3.2), 0.0).any()
    assert grid.holding(starts, starts + 3, (2.8, 3.1), 0.25).tolist() == [True, False, False]


def test_any_event_is_in_a_window_of_a_grid_without_gaps():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        length = rng.uniform(0.1, 5)
        hop = length * rng.uniform(0.2, 1)
        seconds = rng.uniform(0.05, 30)
        spans = np.array(grid.spans(seconds, length, hop))
        start = rng.uniform(0, seconds)
        end = min(seconds, start + rng.choice([0.001, 0.1, 0.4, 3]))
        if end > start:
            holding = grid.holding(spans[:, 0], spans[:, 1], (start, end), rng.uniform(0, 1))
            assert holding.any(), (seconds, length, hop, start, end)
