"""The front end of an encoder: which spectrogram a waveform becomes.

Kaldi's log-mel filter bank (rust/core/src/fbank/mod.rs) at any rate, with any windows and bands. An
encoder reads the spectrograms that its run's config names, and no others.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loaders.io import checks

RATES = (1_000, 768_000)  # [Hz]
WINDOWS = (16, 32_768)  # [samples] a sum of as many of 16 bits fits in 32
HOPS = (1, 1 << 20)  # [samples]
MELS = (1, 4096)


@dataclass(frozen=True)
class FrontEnd(checks.Section):
    """That of Bird-MAE by default: 32 kHz, 25 ms every 10 ms, 128 bands from 20 Hz to 16 kHz."""

    on_resume = checks.OnResume(checks.FUNCTION)

    # [Hz] of the waveform before the filter bank, to which recordings are resampled
    sample_rate: int = 32_000
    window_ms: float = 25.0  # [ms] of a frame
    hop_ms: float = 10.0  # [ms] from one frame to the next
    n_mels: int = 128  # [bands] of a spectrogram
    f_min: float = 20.0  # [Hz] lower end of the lowest band
    f_max: float = 0.0  # [Hz] upper end of the highest band; 0 = half of sample_rate
    mean: float = -7.2  # [ln energy] of the data's spectrograms: a row holds (x - mean) / (2 std)
    std: float = 4.43  # [ln energy] standard deviation of the same

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.within(self, f"[{RATES[0]}, {RATES[1]}]", "sample_rate")
        rate = self.sample_rate
        for name, (least, most) in (("window_ms", WINDOWS), ("hop_ms", HOPS)):
            value = getattr(self, name)
            if not math.isfinite(value) or not least <= self._samples(value) <= most:
                yield (
                    name,
                    (
                        f"is {value}; at {rate} Hz it must lie in [{1e3 * least / rate:.4g},"
                        f" {1e3 * most / rate:.4g}]"
                    ),
                )
        yield from checks.within(self, f"[{MELS[0]}, {MELS[1]}]", "n_mels")
        if not 0 <= self.f_min < self.highest:
            yield (
                "f_min",
                (
                    f"is {self.f_min}; it must lie in [0, {self.highest:g}), below the end of the"
                    " highest band"
                ),
            )
        if not 0 <= self.f_max <= rate / 2:
            yield (
                "f_max",
                (
                    f"is {self.f_max}; it must lie in [0, {rate / 2:g}], where 0 is half of"
                    f" sample_rate={rate}"
                ),
            )
        if not math.isfinite(self.mean):
            yield "mean", f"is {self.mean}; it must be a number"
        yield from checks.positive(self, "std")

    @property
    def window(self) -> int:
        """Samples of a frame."""
        return self._samples(self.window_ms)

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return self._samples(self.hop_ms)

    @property
    def highest(self) -> float:
        """Upper end of the highest band [Hz]."""
        return float(self.f_max or self.sample_rate / 2)

    @property
    def scale(self) -> float:
        """The divisor of a row's values."""
        return 2 * self.std

    @property
    def front_end(self) -> "FrontEnd":
        """These fields alone, of a section that has more."""
        return FrontEnd(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(FrontEnd)}
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The decisive values in samples and Hz, equal if two give the same spectrograms."""
        whole = {name: getattr(self, name) for name in ("sample_rate", "window", "hop", "n_mels")}
        return whole | {
            "f_min": float(self.f_min),
            "f_max": self.highest,
            "mean": float(self.mean),
            "std": float(self.std),
        }

    def n_clip_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in a clip."""
        return 0 if n_samples < self.window else 1 + (n_samples - self.window) // self.hop

    def differences(self, other: "FrontEnd") -> str:
        """Return differences of two front ends: "hop 320 and 160 samples", or ""."""
        units = {
            "sample_rate": " Hz",
            "window": " samples",
            "hop": " samples",
            "f_min": " Hz",
            "f_max": " Hz",
        }
        mine, theirs = self.settings, other.settings
        unlike = [name for name in mine if mine[name] != theirs[name]]
        return ", ".join(
            f"{name} {mine[name]:g} and {theirs[name]:g}{units.get(name, '')}" for name in unlike
        )

    def _samples(self, ms: float) -> int:
        """As Kaldi counts them: whole samples, rounded down."""
        return math.floor(self.sample_rate * ms / 1e3 + 1e-6)


DEFAULT = FrontEnd()


def of_run(config: Mapping[str, Any]) -> FrontEnd:
    """Return the front end of a run's config.json. Raises ValueError: none that is one, or two."""
    trained, own = (
        saved(config.get("data") or {}),
        (config.get("model") or {}).get("front_end") or {},
    )
    if own and (unlike := saved(own).differences(trained)):
        raise ValueError(f"sections model and data name different front ends: {unlike}")
    return trained


def saved(data: Mapping[str, Any]) -> FrontEnd:
    """Return the front end of a section "data", as saved or by default. Raises ValueError."""
    known = {
        field.name: data[field.name] for field in dataclasses.fields(FrontEnd) if field.name in data
    }
    for name, value in known.items():
        whole = isinstance(getattr(FrontEnd, name), int)
        if type(value) is not int and (whole or type(value) is not float) or abs(value) > 1e9:
            raise ValueError(
                f"data.{name} is {str(value)[:40]}; expected a {'whole ' if whole else ''}number up"
                " to 1e9"
            )
    front_end = FrontEnd(**known)
    for name, text in front_end.validate():
        raise ValueError(f"data.{name} {text}")
    return front_end
