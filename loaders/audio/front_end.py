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

    # [Hz] rate that recordings are resampled to, before the filter bank
    sample_rate: int = 32_000
    window_ms: float = 25.0  # [ms] length of a frame
    hop_ms: float = 10.0  # [ms] time from one frame to the next
    n_mels: int = 128  # [bands] number of bands of a spectrogram
    f_min: float = 20.0  # [Hz] lower end of the lowest band
    f_max: float = 0.0  # [Hz] upper end of the highest band; 0 = half of sample_rate
    # [ln energy] mean of the data's spectrograms: a row holds (x - mean) / (2 std)
    mean: float = -7.2
    std: float = 4.43  # [ln energy] standard deviation of the data's spectrograms

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.within(self, f"[{RATES[0]}, {RATES[1]}]", "sample_rate")
        yield from self._validate_ms("window_ms", self.window_ms, WINDOWS)
        yield from self._validate_ms("hop_ms", self.hop_ms, HOPS)
        yield from checks.within(self, f"[{MELS[0]}, {MELS[1]}]", "n_mels")
        if not 0 <= self.f_min < self.highest:
            yield (
                "f_min",
                f"is {self.f_min}; it must lie in [0, {self.highest:g}), below the end of the"
                " highest band",
            )
        nyquist = self.sample_rate / 2
        if not 0 <= self.f_max <= nyquist:
            yield (
                "f_max",
                f"is {self.f_max}; it must lie in [0, {nyquist:g}], where 0 is half of"
                f" sample_rate={self.sample_rate}",
            )
        if not math.isfinite(self.mean):
            yield "mean", f"is {self.mean}; it must be a number"
        yield from checks.positive(self, "std")

    def _validate_ms(
        self, name: str, ms: float, samples: tuple[int, int]
    ) -> Iterator[tuple[str, str]]:
        """Yield a duration in ms that is not within a range of samples."""
        least, most = samples
        if not math.isfinite(ms) or not least <= self._samples(ms) <= most:
            rate = self.sample_rate
            yield (
                name,
                f"is {ms}; at {rate} Hz it must lie in [{1e3 * least / rate:.4g},"
                f" {1e3 * most / rate:.4g}]",
            )

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
        names = [field.name for field in dataclasses.fields(FrontEnd)]
        return FrontEnd(**{name: getattr(self, name) for name in names})

    @property
    def settings(self) -> dict[str, Any]:
        """The decisive values in samples and Hz, equal if two give the same spectrograms."""
        return {
            "sample_rate": self.sample_rate,
            "window": self.window,
            "hop": self.hop,
            "n_mels": self.n_mels,
            "f_min": float(self.f_min),
            "f_max": self.highest,
            "mean": float(self.mean),
            "std": float(self.std),
        }

    def n_clip_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in a clip."""
        if n_samples < self.window:
            return 0
        return 1 + (n_samples - self.window) // self.hop

    def differences(self, other: "FrontEnd") -> str:
        """Return differences of two front ends: "hop 320 and 160 samples", or ""."""
        units = {
            "sample_rate": " Hz",
            "window": " samples",
            "hop": " samples",
            "f_min": " Hz",
            "f_max": " Hz",
        }
        theirs = other.settings
        differences = []
        for name, value in self.settings.items():
            if value != theirs[name]:
                unit = units.get(name, "")
                differences.append(f"{name} {value:g} and {theirs[name]:g}{unit}")
        return ", ".join(differences)

    def _samples(self, ms: float) -> int:
        """As Kaldi counts them: whole samples, rounded down."""
        return math.floor(self.sample_rate * ms / 1e3 + 1e-6)


DEFAULT = FrontEnd()


def of_run(config: Mapping[str, Any]) -> FrontEnd:
    """Return the front end of a run's config.json. Raises ValueError: none that is one, or two."""
    of_data = saved(config.get("data") or {})
    of_model = (config.get("model") or {}).get("front_end")
    if of_model:
        differences = saved(of_model).differences(of_data)
        if differences:
            raise ValueError(f"sections model and data name different front ends: {differences}")
    return of_data


def saved(data: Mapping[str, Any]) -> FrontEnd:
    """Return the front end of a section "data", as saved or by default. Raises ValueError."""
    names = [field.name for field in dataclasses.fields(FrontEnd)]
    values = {name: data[name] for name in names if name in data}
    for name, value in values.items():
        is_whole = isinstance(getattr(FrontEnd, name), int)
        kinds = (int,) if is_whole else (int, float)
        if type(value) not in kinds or abs(value) > 1e9:
            kind = "whole number" if is_whole else "number"
            raise ValueError(f"data.{name} is {str(value)[:40]}; expected a {kind} up to 1e9")
    front_end = FrontEnd(**values)
    for name, problem in front_end.validate():
        raise ValueError(f"data.{name} {problem}")
    return front_end
