//! A batch as numpy arrays: each array keeps its slab alive, so no row is copied.

use std::sync::Arc;

use jaxtrain_loader::pipeline::{Config, Form, CLIP, EPOCH, INDEX, LABEL, WEIGHT};
use jaxtrain_loader::slab::Slab;
use numpy::ndarray::{ArrayView, Dimension, IntoDimension};
use numpy::{Element, PyArray, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The fields of a batch. Each is a list of arrays, one for each range.
pub fn fields<'py>(
    py: Python<'py>, config: &Config, slab: Arc<Slab>,
) -> PyResult<Bound<'py, PyDict>> {
    let base = Bound::new(py, SlabBase(slab))?;
    let ranges = 0..config.ranges.len();
    let scalars = |field| {
        PyList::new(py, ranges.clone().map(|r| SlabBase::array::<i32>(&base, r, field, ())))
    };
    let shape = match config.form {
        Form::Waveform => vec![config.views, config.clip_samples],
        _ => vec![config.views, config.n_frames, config.bank.front_end().n_mels],
    };
    let shape = if config.views == 1 { &shape[1..] } else { &shape[..] };
    let clips = ranges.clone().map(|r| match config.form {
        Form::Float32 => SlabBase::array::<f32>(&base, r, CLIP, shape),
        Form::Bfloat16 => SlabBase::array::<u16>(&base, r, CLIP, shape),
        Form::Waveform => SlabBase::array::<i16>(&base, r, CLIP, shape),
    });
    let name = if config.form == Form::Waveform { "waveform" } else { "spectrogram" };
    let weights = ranges.clone().map(|r| SlabBase::array::<f32>(&base, r, WEIGHT, ()));
    let fields = PyDict::new(py);
    fields.set_item(name, PyList::new(py, clips)?)?;
    fields.set_item("label", scalars(LABEL)?)?;
    fields.set_item("index", scalars(INDEX)?)?;
    fields.set_item("epoch", scalars(EPOCH)?)?;
    fields.set_item("weight", PyList::new(py, weights)?)?;
    Ok(fields)
}

/// The base object of a batch's arrays: the slab lives as long as any of them.
#[pyclass(frozen)]
struct SlabBase(Arc<Slab>);

impl SlabBase {
    /// A read-only array over a field of a range. `shape` is that of one row.
    fn array<'py, T: Element>(
        this: &Bound<'py, Self>, range: usize, field: usize, shape: impl IntoDimension,
    ) -> Bound<'py, PyAny> {
        let (start, bytes) = this.get().0.array(range, field);
        let mut dims = vec![0];
        dims.extend(shape.into_dimension().slice());
        let row: usize = dims[1..].iter().product::<usize>() * size_of::<T>();
        dims[0] = bytes / row;
        // SAFETY: the slab holds `bytes` initialised bytes of plain numbers here, and its workers have finished.
        let view = unsafe { ArrayView::from_shape_ptr(dims, start.cast::<T>().cast_const()) };
        // SAFETY: the array's base object, `this`, keeps the slab alive.
        let array = unsafe { PyArray::borrow_from_array(&view, this.clone().into_any()) };
        array.readwrite().make_nonwriteable();
        array.into_any()
    }
}
