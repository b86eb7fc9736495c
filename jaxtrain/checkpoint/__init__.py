"""Checkpoints of a run.

manager          the checkpoints as the loop sees them
checkpointer     saves and restores the steps of one workdir. Its docstring specifies the files of a
                 step
init_or_restore  the list of all sources of a run's state
history          facts about a run that are saved with its state: its data, rewinds, the best step
checksums        the manifest of a step, by which a reader recognises damage
joint_failure    a save that fails in one process fails in all
disk_usage       bytes of the checkpoints on disk
base_weights     the source of frozen weights: its exact step and its digest
warm_start       parameters of another run as the start of this one
"""

from jaxtrain.checkpoint.checkpointer import Checkpointer, Restored, Saved
from jaxtrain.checkpoint.history import CheckpointError, History

__all__ = ["CheckpointError", "Checkpointer", "History", "Restored", "Saved"]
