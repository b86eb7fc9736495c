"""`jaxtrain train --supervise`: processes that are restarted when one of them ends.

supervisor        starts a process, waits for its end, agrees with others on the next start
leader            the supervisor that decides, and its successor
attempts          the rules: which ends are final, the cause of an end, when a run is given up
fewer             the mesh of a run on fewer of its processes
warm_process      the supervisor's side of a process that is started without its imports
full_disk         a wait for room
template          the other side: a process with the imports done, whose forks train
steps_in_memory   the last steps of each process, in shared memory of its host
parts             the parts of arrays that a process holds, also from those of another mesh
partners          copies of them on another host
"""

from jaxtrain.supervise.supervisor import run

__all__ = ("run",)
