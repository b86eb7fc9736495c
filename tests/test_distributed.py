"""From an environment to the processes of a run."""

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.distributed import Cluster, cluster

C, N, I = "JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Cluster("", 1, 0)),
        ({"HOME": "/root", C: "", N: "", I: ""}, Cluster("", 1, 0)),
        ({C: "10.0.0.1:27508", N: "4", I: "0"}, Cluster("10.0.0.1:27508", 4, 0)),
        ({C: "node-7:1", N: "4", I: "3"}, Cluster("node-7:1", 4, 3)),
        ({C: "[::1]:27508", N: "2", I: "1"}, Cluster("[::1]:27508", 2, 1)),
        ({C: "localhost:27508", N: "1", I: "0"}, Cluster("localhost:27508", 1, 0)),
    ],
)
def test_an_environment_that_makes_sense(environment, expected):
    assert cluster(environment) == expected


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({C: "h:1"}, [N, I]),
        ({N: "2"}, [C, I]),
        ({I: "0"}, [C, N]),
        ({C: "h:1", I: "0"}, [N]),
        ({C: "h:1", N: "2", I: "2"}, ["process 2 of 2"]),
        ({C: "h:1", N: "0", I: "0"}, ["process 0 of 0"]),
        ({C: "h:1", N: "two", I: "-1"}, [f"{N}='two'", f"{I}='-1'"]),
        ({C: "h", N: "2", I: "0"}, [f"{C}='h' is no host:port"]),
        ({C: ":80", N: "2", I: "0"}, ["no host:port"]),
        ({C: "h:", N: "x"}, [I, "no host:port", f"{N}='x'"]),
    ],
)
def test_an_environment_that_does_not_is_told_whole(environment, told):
    with pytest.raises(ConfigError) as error:
        cluster(environment)
    assert len(error.value.problems) == len(told)
    for part in told:
        assert part in str(error.value)
