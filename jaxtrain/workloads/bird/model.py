"""Bird audio: a vision transformer over log-mel spectrograms, trained with labels or without, and an online probe.

The loss is a weighted sum of objectives, each on where its weight is above 0; each is one file of `objectives`:

    supervised  cross-entropy with the class, or the asymmetric loss of several (Ridnik et al. 2021)
    lejepa      views of a recording agree, and embeddings are spread like a Gaussian (Balestriero & LeCun 2025)
    diet        which of all recordings it is (Ibrahim et al. 2024)
    mae         the values of masked patches, from the visible ones (He et al. 2022)
    teacher     the features of masked patches by an average of the encoder, from the visible ones (Assran et al. 2023)

mae and teacher share masks and the pass over visible patches; the others share one over all patches. The probe (layer norm,
linear) reads the same features without passing gradients back: it has its own learning rate, and is comparable between
objectives. A row of the batch may hold several views of its recording (data.views); every view is encoded.

Modules, each of which imports only those before it: export, timm, settings, classes, probe and heads, objective, views,
objectives, config, task.
"""

from jaxtrain.workloads.bird.classes import asymmetric_loss, cross_entropy
from jaxtrain.workloads.bird.config import Config, forward_flops, make_specs, train_flops
from jaxtrain.workloads.bird.export import EXPORT
from jaxtrain.workloads.bird.objectives import OBJECTIVES
from jaxtrain.workloads.bird.objectives.diet import Diet
from jaxtrain.workloads.bird.objectives.lejepa import Lejepa
from jaxtrain.workloads.bird.objectives.mae import Mae
from jaxtrain.workloads.bird.objectives.supervised import Supervised
from jaxtrain.workloads.bird.objectives.teacher import Teacher
from jaxtrain.workloads.bird.settings import POOLS, Mask
from jaxtrain.workloads.bird.task import make_task

__all__ = [
    "EXPORT", "OBJECTIVES", "POOLS", "Config", "Diet", "Lejepa", "Mae", "Mask", "Supervised", "Teacher", "asymmetric_loss",
    "cross_entropy", "forward_flops", "make_specs", "make_task", "train_flops",
]  # fmt: skip
