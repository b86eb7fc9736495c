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

POOLS = ("cls", "patches")
FORMS = ("spectrogram", "waveform")


@dataclass(frozen=True)
class Mask(Section):
    """Which patches are hidden from a pass over visible patches."""

    on_resume = checks.OnResume(checks.FUNCTION)

    ratio: float = 0.75  # [1] share of the patches
    block: int = 2  # [patches] side of the squares that are masked together


@dataclass(frozen=True)
class Settings(vit.Encoder, ModelSection):
    """ViT-S by default."""

    on_resume = checks.OnResume(checks.FUNCTION, state=("n_classes", "n_recordings"))

    shared = ("n_frames", "n_mels")
    # [classes] None = as many as the data have names for. Without any there is no probe
    n_classes: int | None = None
    # [names] of the classes, for detect; None = as the data name them
    class_names: tuple[str, ...] | None = None
    # [bool] a recording has any number of classes; None = as the data have it
    multilabel: OfData[bool] = OF_DATA
    # [recordings] that diet distinguishes; None = as many as the data have
    n_recordings: int | None = None
    views: OfData[int] = OF_DATA  # [views] of a recording in a row; None = as the data have it
    # [name] of a view's values: spectrogram, or waveform, int16; None = as the data have it
    form: OfData[str] = OF_DATA
    # [section] which spectrograms the encoder reads; None = as the data section says
    front_end: OfData[FrontEnd] = OF_DATA
    # [name] the features that objectives and probe read: the mean of "cls" or of "patches"
    pool: str = "cls"
    mask: Mask = field(default_factory=Mask)  # [section]
    augment: augment_lib.Augment = field(default_factory=augment_lib.Augment)  # [section]

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from checks.under("augment", self.augment.validate())
        yield from checks.choice(self, POOLS, "pool")
        yield from checks.choice(self, (*FORMS, None), "form")
        yield from checks.under("mask", checks.at_least(self.mask, 1, "block"))
        if all(part > 0 for part in self.patch) and not 0 < self.n_masked < self.n_patches:
            yield (
                "mask.ratio",
                f"is {self.mask.ratio}, which masks {self.n_masked} of {self.n_patches} patches",
            )

    def validate_start(self, rules: Any) -> Iterator[tuple[str, str]]:
        return timm.validate_start(self, rules)

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("n_classes", "n_recordings"):
            value, needed = getattr(self, name), info.get(name, 0)
            if value is not None and value < needed:
                yield (
                    name,
                    f"is {value}, and the data have {needed}; config.model.{name}=None takes that",
                )
        if self.multilabel is not None and bool(info.get("multilabel")) != self.multilabel:
            yield (
                "multilabel",
                f"is {self.multilabel}, and data.label names a column of the other kind",
            )
        n_views = info.get("views", 1)
        if self.views not in (None, n_views):
            yield "views", f"is {self.views}, and the data have {n_views}; set data.views"
        names = info.get("class_names", ())
        if self.class_names and names and self.class_names != tuple(names):
            differing = next(
                (pair for pair in zip(self.class_names, names, strict=False) if pair[0] != pair[1]),
                None,
            )
            text = (
                f"has {differing[0]!r}, and at its place"
                if differing
                else f"has {len(self.class_names)} names, and"
            )
            yield (
                "class_names",
                f"{text} the data have {differing[1] if differing else len(names)!r}; unset it",
            )
        if self.form not in (None, info.get("form", "spectrogram")):
            yield (
                "form",
                (
                    f"is {self.form!r}, and data.form is {info.get('form', 'spectrogram')!r}; both"
                    " must be the same"
                ),
            )
        if self.augment.background and not info.get("background"):
            yield (
                "augment.background",
                f"is {self.augment.background}, and data.background names no recordings",
            )
        for name in self.shared:
            if getattr(self, name) != info.get(name, getattr(self, name)):
                yield (
                    name,
                    (
                        f"is {getattr(self, name)}, and data.{name} is {info[name]}; give one of"
                        " them, or both the same"
                    ),
                )
        if self.front_end and (
            unlike := self.front_end.differences(info.get("front_end", self.front_end))
        ):
            yield "front_end", f"is another than the data section's ({unlike}); leave it unset"

    def validate_warm_start(self, source: Mapping[str, Any]) -> Iterator[str]:
        is_ours = workload.is_kind(source.get("workload"), __package__)
        if not is_ours or not isinstance(data := source.get("data"), Mapping):
            return
        try:
            if unlike := front_end_lib.saved(data).differences(self.spectrograms):
                remedy = (
                    "set config.data as the source has it, or"
                    " config.warm_start.other_front_end=true"
                )
                yield (
                    f"its encoder was trained on other spectrograms than this run's: {unlike};"
                    f" {remedy}"
                )
        except ValueError as error:
            yield f"its config's {error}"

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
