"""What a run saves, and how it is read again.

checkpointer  saves and restores the runs of one workdir; its docstring specifies the files of a step
history       what a run knows besides its state; which step is the best so far
late          what a disk answers after a save has failed
checksums     the manifest of a step: what was written is what is read
meeting       where the processes of a save wait for each other, and hear of one that failed
read          arrays on disk, of a step or of safetensors, without the mesh that wrote them
warm_start    parameters of another run as the start of this one
"""

from jaxtrain.checkpoint.checkpointer import Checkpointer, Restored, Saved
from jaxtrain.checkpoint.history import CheckpointError, History

__all__ = ["CheckpointError", "Checkpointer", "History", "Restored", "Saved"]
