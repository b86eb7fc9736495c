"""The processes of a run: how they find each other, meet, agree, stop, and end if one hangs.

discover      environment -> Cluster, a pure function
rendezvous    the processes come together here before JAX joins them
addresses     the addresses of a host, and the sockets that listen there
waiting_room  supervisors that come during an attempt wait here for its end
links         connections during a run, which show at once that a process has ended
handshake     the proof at both ends of its connections that they know the job's secret
processes     joining the processes, and exchanges between them
signals       signals that ask a run to save and end
notices       Google's metadata server: the pod of a machine, and its announced end
watchdog      ends a process whose run makes no progress
"""

from jaxtrain.parallel.cluster.discover import Cluster, ClusterError, secret_of
from jaxtrain.parallel.cluster.links import Links
from jaxtrain.parallel.cluster.notices import Notices, metadata_server
from jaxtrain.parallel.cluster.processes import (
    agree,
    agree_on,
    await_peers,
    barrier,
    commit,
    compare,
    devices,
    digest_of_files,
    facts_of,
    find,
    gather,
    gather_texts,
    initialize,
    is_main,
    leave_devices,
    of_cpus,
    start_jax,
    use_threads_for_host_devices,
    versions,
)
from jaxtrain.parallel.cluster.rendezvous import RendezvousError, Stopped
from jaxtrain.parallel.cluster.signals import CTRL_C, StopSignals
from jaxtrain.parallel.cluster.watchdog import Watchdog

__all__ = (
    "CTRL_C",
    "Cluster",
    "ClusterError",
    "Links",
    "Notices",
    "RendezvousError",
    "StopSignals",
    "Stopped",
    "Watchdog",
    "agree",
    "agree_on",
    "barrier",
    "commit",
    "compare",
    "devices",
    "digest_of_files",
    "facts_of",
    "find",
    "gather",
    "gather_texts",
    "initialize",
    "is_main",
    "leave_devices",
    "await_peers",
    "of_cpus",
    "metadata_server",
    "secret_of",
    "start_jax",
    "use_threads_for_host_devices",
    "versions",
)
