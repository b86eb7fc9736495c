"""The processes of a run: how they find each other, meet, agree, are asked to stop, and end when one holds the others up.

discover      environment -> Cluster, a pure function
rendezvous    the roll call before JAX joins the processes
handshake     both ends of its connections prove that they know the job's secret
processes     joining them; what they agree on, compare, gather and wait for
signals       signals that ask a run to save and end
notices       what Google's metadata server says about this machine
watchdog      ends a process whose run makes no progress
"""

from jaxtrain.parallel.cluster.discover import Cluster, ClusterError
from jaxtrain.parallel.cluster.notices import Notices, metadata_server
from jaxtrain.parallel.cluster.processes import (
    agree,
    agree_on,
    barrier,
    commit,
    compare,
    digest_of_extension,
    digest_of_files,
    find,
    gather,
    initialize,
    is_main,
    use_compilation_cache,
    use_threads_for_host_devices,
    versions,
)
from jaxtrain.parallel.cluster.rendezvous import RendezvousError, Stopped
from jaxtrain.parallel.cluster.signals import StopSignals
from jaxtrain.parallel.cluster.watchdog import Watchdog

__all__ = [
    "Cluster",
    "ClusterError",
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
    "digest_of_extension",
    "digest_of_files",
    "find",
    "gather",
    "initialize",
    "is_main",
    "metadata_server",
    "use_compilation_cache",
    "use_threads_for_host_devices",
    "versions",
]
