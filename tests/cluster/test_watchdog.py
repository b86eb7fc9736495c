"""Find the process that holds the others up, from the reports of all."""

import pytest

from jaxtrain.parallel.cluster.watchdog import blame


def report(count, time=100.0, doing="step 7"):
    return {"count": count, "doing": doing, "time": time}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({0: report(8), 1: report(7, doing="step 6")}, "process 1 is stuck at step 6"),
        ({0: report(7), 1: report(7)}, "all processes are at step 7"),
        ({0: report(8), 1: report(9, time=40.0)}, "process 1 has been silent for 61 s, at step 7"),
        ({1: report(9)}, "process 0 has never sent a heartbeat"),
        ({}, "process 0 has never sent a heartbeat; process 1 has never sent a heartbeat"),
    ],
)
def test_the_process_that_holds_the_others_up_is_named(reports, expected):
    assert blame(reports, 2, now=101.0, timeout=15.0) == expected


def test_a_process_alone_is_stuck_where_it_is():
    assert blame({0: report(3)}, 1, now=101.0, timeout=15.0) == "process 0 is stuck at step 7"
