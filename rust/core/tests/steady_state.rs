//! Once warm, the pipeline allocates for each batch (its slot, its slab's handle) but not for each row.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field};
use jaxtrain_loader::pipeline::{Block, Clip, Config, Form, Next, Pipeline};
use jaxtrain_loader::source::{Index, Options};

mod counting;

use counting::CALLS;

/// The tests' recordings, of every format, again and again.
fn index() -> Index {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/decode");
    let names = [
        "vorbis_32k_mono.ogg",
        "opus_48k_stereo.opus",
        "mp3_44k_stereo.mp3",
        "flac_48k_stereo.flac",
        "wav_22k_mono.wav",
    ];
    let recordings: Vec<_> = names
        .iter()
        .cycle()
        .take(40)
        .map(|name| std::fs::read(folder.join(name)).unwrap())
        .collect();
    let bytes = BinaryArray::from_iter_values(&recordings);
    let names = StringArray::from_iter_values((0..40).map(|i| i.to_string()));
    let audio = StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), Arc::new(bytes) as ArrayRef),
        (Arc::new(Field::new("path", DataType::Utf8, true)), Arc::new(names) as ArrayRef),
    ]);
    let batch = RecordBatch::try_from_iter([("audio", Arc::new(audio) as ArrayRef)]).unwrap();
    let path = std::env::temp_dir().join(format!("jaxtrain-steady-{}.arrow", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(file, &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let index =
        Index::open(std::slice::from_ref(&path), Options { audio: "audio", ..Options::default() })
            .unwrap();
    std::fs::remove_file(path).unwrap(); // the mapping stays
    index
}

#[test]
fn no_row_allocates_once_warm() {
    let index = Arc::new(index());
    let block = Some(Block { rows: 4, window: 2 });
    let cases = [
        (1, Form::Float32, None),
        (3, Form::Bfloat16, None),
        (1, Form::Bfloat16, block),
        (2, Form::Waveform, None),
    ];
    for (views, form, block) in cases {
        let config = Config {
            rows: (0..40).collect(),
            batch: 16,
            ranges: vec![(0, 16)],
            seed: 0,
            train: true,
            bank: Arc::default(),
            time_expansion: 1.0,
            clip_samples: 16_000,
            n_frames: 50,
            views,
            channel: None,
            clip: Clip::default(),
            form,
            block,
            threads: 2,
            depth: 2,
            bad_budget: 0.0,
        };
        let pipeline = Pipeline::new(index.clone(), config).unwrap();
        let take = |n| {
            for _ in 0..n {
                let next = pipeline.next(Duration::from_secs(60)).unwrap();
                assert!(matches!(next, Next::Batch(..)));
            }
        };
        take(10);
        let before = CALLS.load(Relaxed);
        take(25);
        let calls = CALLS.load(Relaxed) - before;
        // For 25 batches: a slot and a slab each, and those of batches that were only started. In the block order each
        // epoch (40 rows here) adds lists, for the workers and for reading ahead.
        let allowed = if block.is_some() { 25 * 8 } else { 25 * 4 };
        assert!(
            calls <= allowed,
            "{calls} allocations in 25 batches of 16 rows ({views} views, {form:?})"
        );
        pipeline.close();
    }
}
