"""Checkpoints of a run.

checkpointer     saves and restores the steps of one workdir. Its docstring specifies the files of a
                 step
history          facts about a run that are saved with its state: its data, rewinds, the best step
run_identity     the run that a folder of checkpoints outside a workdir belongs to
joint_failure    a save that fails in one process fails in all
data_of_run      fields that a config leaves to the data, as a resumed run keeps them
disk_usage       bytes of the checkpoints on disk
"""

from jaxtrain.checkpoint.checkpointer import Checkpointer, Restored, Saved
from jaxtrain.checkpoint.history import CheckpointError, History, SaveError

__all__ = ["CheckpointError", "Checkpointer", "History", "Restored", "SaveError", "Saved"]
