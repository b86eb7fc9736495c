//! One waveform at a time: decoding, resampling, spectrograms.

use jaxtrain_loader::decode::Decoder;
use jaxtrain_loader::fbank::{Fbank, N_MELS};
use jaxtrain_loader::pipeline;
use jaxtrain_loader::resample::Resampler;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Frames of a normalised spectrogram.
pub const N_FRAMES: usize = 512;

/// Decode a recording, or a part of it, to mono.
///
/// The format is recognised by its content: WAV, FLAC, MP3, OGG Vorbis or OGG Opus (always decoded to 48 kHz).
/// The samples are [start, start + length); length=None decodes to the end.
///
/// Returns (wave, rate, frames): float32 [length], the mean of the channels at the recording's own sample rate;
/// that rate in Hz; the number of samples per channel in the whole recording.
/// Raises ValueError for an unknown format, damaged audio, or a range outside the recording.
#[pyfunction]
#[pyo3(signature = (data, start = 0, length = None))]
pub fn decode<'py>(
    py: Python<'py>,
    data: &[u8],
    start: u64,
    length: Option<u64>,
) -> PyResult<(Bound<'py, PyArray1<f32>>, u32, u64)> {
    let decoded = py.detach(|| {
        let mut decoder = Decoder::new();
        let info = decoder.info(data).map_err(|e| e.to_string())?;
        let length = length.unwrap_or(info.frames.saturating_sub(start));
        if start.checked_add(length).is_none_or(|end| end > info.frames) {
            return Err(format!(
                "samples [{start}, {start} + {length}) are not inside the recording's {} frames",
                info.frames
            ));
        }
        let mut wave = Vec::new();
        let n = usize::try_from(length).map_err(|e| e.to_string())?;
        // The length comes from the recording's header, which may claim any number.
        wave.try_reserve_exact(n).map_err(|e| e.to_string())?;
        wave.resize(n, 0.0);
        decoder.read(data, &info, start, &mut wave).map_err(|e| e.to_string())?;
        Ok((wave, info))
    });
    let (wave, info) = decoded.map_err(PyValueError::new_err)?;
    Ok((wave.into_pyarray(py), info.rate, info.frames))
}

/// Resample a waveform from source_rate to target_rate (Hz), without delay.
///
/// Returns float32 [round(n * target_rate / source_rate)] for n input samples.
/// Raises ValueError for a rate of 0.
#[pyfunction]
pub fn resample<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    source_rate: u32,
    target_rate: u32,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    if source_rate == 0 || target_rate == 0 {
        return Err(PyValueError::new_err(format!(
            "source_rate = {source_rate} Hz and target_rate = {target_rate} Hz must be at least 1"
        )));
    }
    let wave = wave.as_slice()?;
    let out = py.detach(|| {
        let (n, from, to) = (wave.len() as u128, u128::from(source_rate), u128::from(target_rate));
        let mut out = vec![0.0; ((n * to + from / 2) / from) as usize];
        Resampler::new(source_rate, target_rate).process(wave, 0, &mut out);
        out
    });
    Ok(out.into_pyarray(py))
}

/// Compute the Kaldi-compatible log-mel spectrogram of a waveform at 32 kHz.
///
/// Returns float32 [1 + (n - 800) // 320, 128] for n samples: natural log of the energy.
/// normalise=True returns float32 [512, 128] as the model reads it: padded with the spectrogram's minimum, then
/// (x + 7.2) / 8.86.
/// Raises ValueError for fewer than 800 samples and, with normalise=True, for more than 512 frames.
#[pyfunction]
#[pyo3(signature = (wave, *, normalise = false))]
pub fn fbank<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    normalise: bool,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let wave = wave.as_slice()?;
    let n = Fbank::n_frames(wave.len());
    let frames = if normalise { N_FRAMES } else { n };
    if n == 0 || n > frames {
        let expected = if normalise { format!("1 to {frames}") } else { "at least 1".into() };
        return Err(PyValueError::new_err(format!("{} samples make {n} frames; expected {expected}", wave.len())));
    }
    let out = py.detach(|| {
        let mut out = vec![0.0; frames * N_MELS];
        let mut bank = Fbank::new();
        if normalise {
            bank.normalised(wave, frames, &mut out);
        } else {
            bank.log_mel(wave, &mut out);
        }
        out
    });
    out.into_pyarray(py).reshape([frames, N_MELS])
}

/// Compute the spectrogram that the pipeline makes of this recording in a test split of one view.
///
/// wave: float32 [n] at rate (Hz). clip_samples: length of the clip at 32 kHz, taken from the recording's centre, or
/// the whole recording centred between zeros where it is shorter.
///
/// Returns float32 [n_frames, 128], normalised.
/// Raises ValueError for a rate of 0, a clip of no frames or of more than n_frames, and NaN or huge samples.
#[pyfunction]
pub fn front_end<'py>(
    py: Python<'py>,
    wave: PyReadonlyArray1<'py, f32>,
    rate: u32,
    clip_samples: usize,
    n_frames: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    if rate == 0 {
        return Err(PyValueError::new_err("rate = 0 Hz must be at least 1"));
    }
    let frames = Fbank::n_frames(clip_samples);
    if !(1..=n_frames).contains(&frames) {
        return Err(PyValueError::new_err(format!(
            "a clip of {clip_samples} samples makes {frames} frames; expected 1 to {n_frames}"
        )));
    }
    let wave = wave.as_slice()?;
    let mut out = vec![0.0; n_frames * N_MELS];
    py.detach(|| pipeline::front_end(wave, rate, clip_samples, n_frames, &mut out))
        .ok_or_else(|| PyValueError::new_err("the waveform has samples that are NaN or too large"))?;
    out.into_pyarray(py).reshape([n_frames, N_MELS])
}
