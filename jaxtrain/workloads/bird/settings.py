"""Settings of a bird model that no objective decides: encoder, rows, masks, augmentation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain import workload
from jaxtrain.config import ModelSection, Section
from jaxtrain.types import OF_DATA, OfData
from jaxtrain.workloads.bird import augment as augment_lib
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import timm
from loaders.audio import front_end as front_end_lib
from loaders.audio.front_end import DEFAULT, FrontEnd
from loaders.io import checks
from loaders.io.checks import DataSection

POOLS = ("cls", "patches")


@dataclass(frozen=True)
class Mask(Section):
    """Which patches are hidden from a pass over visible patches."""

    on_resume = checks.OnResume(checks.FUNCTION)

    ratio: float = 0.75  # [1] share of the patches that are masked
    block: int = 2  # [patches] side of the squares that are masked together


@dataclass(frozen=True)
class Settings(vit.Encoder, ModelSection):
    """ViT-S by default."""

    on_resume = checks.OnResume(checks.FUNCTION, state=("n_classes", "n_recordings"))

    facts = (
        "n_frames",
        "n_mels",
        "n_classes",
        "class_names",
        "multilabel",
        "n_recordings",
        "views",
        "form",
        "front_end",
    )

    n_classes: int | None = None  # [classes] that the data name. Without any there is no probe
    class_names: tuple[str, ...] | None = None  # [names] of the classes
    multilabel: OfData[bool] = OF_DATA  # [bool] a recording has any number of classes
    n_recordings: int | None = None  # [recordings] that diet distinguishes
    views: OfData[int] = OF_DATA  # [views] crops of a recording in a row
    form: OfData[str] = OF_DATA  # [name] of a view's values: spectrogram, or waveform, int16
    front_end: OfData[FrontEnd] = OF_DATA  # [section] of the spectrograms that the encoder reads
    # [name] the features that objectives and probe read: the mean of "cls" or of "patches"
    pool: str = "cls"
    mask: Mask = field(default_factory=Mask)  # [section]
    augment: augment_lib.Augment = field(default_factory=augment_lib.Augment)  # [section]

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from checks.under("augment", self.augment.validate())
        yield from checks.choice(self, POOLS, "pool")
        if self.pool == "cls" and not self.n_cls:
            yield "pool", "is 'cls', and n_cls=0 means no class token; use pool='patches'"
        yield from checks.under("mask", checks.at_least(self.mask, 1, "block"))
        has_patches = all(side > 0 for side in self.patch)
        if has_patches and not 0 < self.n_masked < self.n_patches:
            yield (
                "mask.ratio",
                f"is {self.mask.ratio}, which masks {self.n_masked} of {self.n_patches} patches",
            )

    def validate_start(self, rules: Any) -> Iterator[tuple[str, str]]:
        return timm.validate_start(self, rules)

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if self.augment.background and not info.get("background"):
            yield (
                "augment.background",
                f"is {self.augment.background}, and data.background names no recordings",
            )

    def validate_warm_start(
        self, source: Mapping[str, Any], place: str, data: DataSection
    ) -> Iterator[str]:
        source_data = source.get("data")
        is_bird = workload.is_kind(source.get("workload", ""), __package__)
        if not is_bird or not isinstance(source_data, Mapping):
            return
        try:
            differences = front_end_lib.saved(source_data).differences(self.spectrograms)
        except ValueError as error:
            yield f"its config's {error}"
            return
        if differences:
            yield (
                f"its encoder was trained on other spectrograms than this run's: {differences};"
                " set config.data as the source has it, or config.warm_start.other_front_end=true"
            )

    @property
    def spectrograms(self) -> FrontEnd:
        """The front end whose spectrograms the encoder reads."""
        return self.front_end or DEFAULT

    @property
    def n_views(self) -> int:
        return self.views or 1

    @property
    def n_masked(self) -> int:
        return int(self.n_patches * self.mask.ratio)
