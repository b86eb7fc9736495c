//! One waveform at a time: decoding, resampling, spectrograms.

use jaxtrain_loader::decode::refuse;
use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use jaxtrain_loader::decode::{Decoder, Info, RATES};
use jaxtrain_loader::fbank::{Fbank, FilterBank as Tables, FrontEnd};
use jaxtrain_loader::pipeline;
use jaxtrain_loader::resample::Resampler;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::exception;

/// Frames of a normalised spectrogram.
const N_FRAMES: usize = 512;

/// Samples, or values of a spectrogram, of one call, at most: 4 GiB of them.
const MAX_VALUES: u64 = 1 << 30;

/// Zeros, or an error if they would be more than `MAX_VALUES`, or than the memory holds.
fn zeros(n: u64) -> Result<Vec<f32>, String> {
    refuse!(
        n > MAX_VALUES,
        Err(format!(
            "{n} values are more than the {MAX_VALUES} that one call gives; ask for a part"
        ))
    );
    let mut values = Vec::new();
    values.try_reserve_exact(n as usize).map_err(|e| e.to_string())?;
    values.resize(n as usize, 0.0);
    Ok(values)
}

pub fn check_rate(name: &str, rate: u32) -> PyResult<()> {
    if RATES.contains(&rate) {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{name} = {rate} Hz must lie in {RATES:?}")))
}

/// Decode a recording, or a part of it, to mono.
#[pyfunction]
#[pyo3(signature = (data, start = 0, length = None, channel = None))]
pub fn decode<'py>(
    py: Python<'py>, data: &[u8], start: u64, length: Option<u64>, channel: Option<u16>,
) -> PyResult<(Bound<'py, PyArray1<f32>>, u32, u64)> {
    let decoded = py.detach(|| {
        let mut decoder = Decoder::default();
        let info = decoder.info(data).map_err(|e| e.to_string())?;
        let length = length.unwrap_or(info.frames.saturating_sub(start));
        info.check_range(start, length).map_err(|e| e.to_string())?;
        let mut wave = zeros(length)?; // a header may claim any number
        decoder.read(data, &info, start, channel, &mut wave).map_err(|e| e.to_string())?;
        Ok::<_, String>((wave, info))
    });
    let (wave, info) = decoded.map_err(PyValueError::new_err)?;
    Ok((wave.into_pyarray(py), info.rate, info.frames))
}

/// Read what the headers of a recording state.
#[pyfunction]
pub fn recording_info(py: Python<'_>, path: PathBuf) -> PyResult<(u32, u64, u16, bool)> {
    with_info(py, path, |decoder, _, info| {
        let original = original(decoder, info);
        (original.rate, original.frames, original.channels, decoder.is_slow())
    })
}

/// The recording that a prepared one was made from, whose times and rates rows have: as the pipeline reads it.
fn original(decoder: &Decoder, info: Info) -> Info {
    let Some(origin) = decoder.origin() else { return info };
    let whole = u128::from(info.stated.max(1));
    let held = u128::from(info.frames).min(whole); // fewer if the file was cut short
    let frames = u128::from(origin.frames) * held / whole;
    let frames = u64::try_from(frames).unwrap_or(origin.frames);
    Info { rate: origin.stated, frames, stated: origin.frames, ..info }
}

/// Look for what is odd about a recording that can be read.
#[pyfunction]
pub fn recording_doubts(py: Python<'_>, path: PathBuf) -> PyResult<(u64, bool)> {
    with_info(py, path, |decoder, bytes, info| {
        (original(decoder, info).stated, decoder.cancels(bytes, &info))
    })
}

/// Look for samples of a recording of floats that floats do not have.
#[pyfunction]
pub fn recording_peak(py: Python<'_>, path: PathBuf) -> PyResult<f32> {
    let peak = || {
        let map = jaxtrain_loader::source::map_file(&path)?;
        Ok(Decoder::default().peak(map.as_deref().unwrap_or(&[])))
    };
    py.detach(peak)
}

/// Count the samples of a recording of floats that no spectrogram can be made of.
#[pyfunction]
pub fn recording_beyond(py: Python<'_>, path: PathBuf) -> PyResult<(u64, u64)> {
    with_info(py, path, |decoder, bytes, _| {
        decoder.beyond(bytes, f64::from(pipeline::PEAK)).unwrap_or_default()
    })
}

/// Samples of each place in which recordings are compared.
const COMPARED: u64 = 512;

/// Return a number for the sound of a recording, the same for its copies without loss.
#[pyfunction]
pub fn recording_sound(py: Python<'_>, path: PathBuf) -> PyResult<Option<u64>> {
    with_info(py, path, |decoder, bytes, info| {
        let mut hasher = DefaultHasher::new();
        let mut varies = false;
        for part in [1, 3, 5] {
            let n = COMPARED.min(info.frames);
            let start = (info.frames - n) / 6 * part;
            let mut samples = vec![0.0; n as usize];
            decoder.read(bytes, &info, start, None, &mut samples).ok()?;
            for sample in &samples {
                ((sample * 32_768.0).round() as i32).hash(&mut hasher);
                varies |= *sample != samples[0];
            }
        }
        varies.then(|| hasher.finish()) // silence is alike in all recordings
    })
}

/// Say why a part of a recording cannot be decoded.
#[pyfunction]
pub fn recording_fault(
    py: Python<'_>, path: PathBuf, start: f64, end: f64,
) -> PyResult<Option<String>> {
    with_info(py, path, |decoder, bytes, info| {
        let original = original(decoder, info);
        let seconds = (original.frames.max(1) as f64) / f64::from(original.rate);
        let rate = match decoder.origin() {
            Some(_) => info.frames as f64 / seconds,
            None => f64::from(info.rate),
        };
        let sample = |time: f64| ((time * rate).round() as u64).min(info.frames);
        let (from, to) = (sample(start), sample(end));
        let mut out = zeros(to.saturating_sub(from)).ok()?;
        let fault = decoder.read(bytes, &info, from, None, &mut out).err();
        let too_large = out.iter().any(|x| x.abs() > pipeline::PEAK);
        let what = too_large.then(|| "has samples that are NaN or too large".to_owned());
        fault.map(|error| error.to_string()).or(what)
    })
}

thread_local! {
    /// The headers of Vorbis take a millisecond to prepare, and the recordings of a folder share them.
    static DECODER: RefCell<Decoder> = RefCell::default();
}

fn with_info<T: Send>(
    py: Python<'_>, path: PathBuf, of: impl Fn(&mut Decoder, &[u8], Info) -> T + Sync,
) -> PyResult<T> {
    let read = || {
        let map = jaxtrain_loader::source::map_file(&path)?;
        let bytes = map.as_deref().unwrap_or(&[]);
        DECODER.with_borrow_mut(|decoder| {
            let info =
                decoder.info(bytes).and_then(|info| decoder.check(bytes, &info).map(|()| info));
            std::io::Result::Ok(
                info.map(|info| of(decoder, bytes, info)).map_err(|e| e.to_string()),
            )
        })
    };
    py.detach(read)?.map_err(PyValueError::new_err)
}

/// Resample a waveform from source_rate to target_rate (Hz), without delay.
#[pyfunction]
pub fn resample<'py>(
    py: Python<'py>, wave: PyReadonlyArray1<'py, f32>, source_rate: u32, target_rate: u32,
) -> PyResult<Bound<'py, PyArray1<f32>>> {
    check_rate("source_rate", source_rate)?;
    check_rate("target_rate", target_rate)?;
    let wave = wave.as_slice()?;
    let out = py.detach(|| {
        let mut resampler = Resampler::new(source_rate, target_rate);
        let mut out = zeros(resampler.output_len(wave.len()) as u64)?;
        resampler.process(wave, 0, &mut out);
        Ok::<_, String>(out)
    });
    Ok(out.map_err(PyValueError::new_err)?.into_pyarray(py))
}

/// The tables of a front end: of waveforms at sample_rate (Hz), Kaldi's log-mel energies.
#[pyclass(frozen)]
pub struct FilterBank(pub Arc<Tables>);

#[pymethods]
impl FilterBank {
    #[new]
    #[pyo3(signature = (*, sample_rate = 32_000, window = 800, hop = 320, n_mels = 128, f_min = 20.0, f_max = 16_000.0,
                        mean = -7.2, std = 4.43))]
    #[allow(clippy::too_many_arguments)] // keywords in Python; one struct from here on
    fn new(
        sample_rate: u32, window: usize, hop: usize, n_mels: usize, f_min: f64, f_max: f64,
        mean: f64, std: f64,
    ) -> PyResult<Self> {
        let front_end = FrontEnd { sample_rate, window, hop, n_mels, f_min, f_max, mean, std };
        Ok(Self(Arc::new(Tables::new(front_end).map_err(exception)?)))
    }
}

impl FilterBank {
    /// The filter bank itself. None is the default one, whose tables are made once.
    pub fn or_default(bank: Option<&Self>) -> Arc<Tables> {
        static DEFAULT: OnceLock<Arc<Tables>> = OnceLock::new();
        bank.map_or_else(|| DEFAULT.get_or_init(Arc::default), |bank| &bank.0).clone()
    }
}

/// Compute the Kaldi-compatible log-mel spectrogram of a waveform at the filter bank's rate.
#[pyfunction]
#[pyo3(signature = (wave, *, bank = None, normalise = false))]
pub fn fbank<'py>(
    py: Python<'py>, wave: PyReadonlyArray1<'py, f32>, bank: Option<&FilterBank>, normalise: bool,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let wave = wave.as_slice()?;
    let mut bank = Fbank::new(FilterBank::or_default(bank));
    let (n, n_mels) = (bank.front_end().n_frames(wave.len()), bank.front_end().n_mels);
    let frames = if normalise { N_FRAMES } else { n };
    if n == 0 || n > frames {
        let expected = if normalise { format!("1 to {frames}") } else { "at least 1".into() };
        return Err(PyValueError::new_err(format!(
            "{} samples make {n} frames; expected {expected}",
            wave.len()
        )));
    }
    let mut out =
        zeros((frames as u64).saturating_mul(n_mels as u64)).map_err(PyValueError::new_err)?;
    let out = py.detach(|| {
        if normalise {
            bank.normalised(wave, frames, &mut out);
        } else {
            bank.log_mel(wave, &mut out);
        }
        out
    });
    out.into_pyarray(py).reshape([frames, n_mels])
}

/// Compute the spectrogram that the pipeline makes of this recording in a test split.
#[pyfunction]
#[pyo3(signature = (wave, rate, clip_samples, n_frames, *, bank = None))]
pub fn front_end<'py>(
    py: Python<'py>, wave: PyReadonlyArray1<'py, f32>, rate: u32, clip_samples: usize,
    n_frames: usize, bank: Option<&FilterBank>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    check_rate("rate", rate)?;
    let bank = FilterBank::or_default(bank);
    let n_mels = bank.front_end().n_mels;
    let frames = bank.front_end().n_frames(clip_samples);
    if !(1..=n_frames).contains(&frames) {
        return Err(PyValueError::new_err(format!(
            "a clip of {clip_samples} samples makes {frames} frames; expected 1 to {n_frames}"
        )));
    }
    let wave = wave.as_slice()?;
    let mut out =
        zeros((n_frames as u64).saturating_mul(n_mels as u64)).map_err(PyValueError::new_err)?;
    py.detach(|| pipeline::front_end(&bank, wave, rate, clip_samples, n_frames, &mut out))
        .ok_or_else(|| {
            PyValueError::new_err("the waveform has samples that are NaN or too large")
        })?;
    out.into_pyarray(py).reshape([n_frames, n_mels])
}
