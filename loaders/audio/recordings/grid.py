"""Where the windows of a recording lie, and which of them hold an event. Times in s."""

import numpy as np

NEAR = 1e-6  # [s] by which times differ that are rounded
# [share] of a window. If less sound follows the last window of the grid, that window is longer by
# it: a window of its own would have nearly the same sound.
TAIL = 0.05


def spans(seconds: float, length: float, hop: float) -> list[tuple[float, float]]:
    """Return start and end of each window: on a grid, and one more that ends with the recording.

    A recording that is shorter than a window is one.
    """
    if seconds <= length:
        return [(0.0, seconds)]
    n_windows = int((seconds - length) / hop + 1e-9) + 1
    windows = []
    for k in range(n_windows):
        start = round(k * hop, 6)
        end = min(round(start + length, 6), seconds)
        windows.append((start, end))
    last_start, last_end = windows[-1]
    tail = seconds - last_end
    if tail > TAIL * length:
        windows.append((round(seconds - length, 6), seconds))
    elif tail > NEAR:
        windows[-1] = (last_start, seconds)
    return windows


def holding(
    starts: np.ndarray, ends: np.ndarray, event: tuple[float, float], least: float
) -> np.ndarray:
    """Return which windows hold an event, bool [n], of windows [starts, ends), float64 [n] each.

    They hold ``least`` seconds of it, or all of a shorter event, or are inside it. An event on the
    edge of windows may be in none of them. Then it is in those that hold half as much.
    """
    start, end = event
    overlap = np.minimum(ends, end) - np.maximum(starts, start)
    enough = np.minimum(min(least, end - start), ends - starts)
    touches = overlap > 0
    holds: np.ndarray = touches & (overlap >= enough - NEAR)
    if not holds.any():
        holds = touches & (overlap >= enough / 2 - NEAR)
    return holds
