//! In steady state no stage allocates: neither decoding, nor resampling, nor the spectrogram.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use jaxtrain_loader::decode::Decoder;
use jaxtrain_loader::fbank::Fbank;
use jaxtrain_loader::resample::Resamplers;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // No count while a thread ends.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn no_sample_allocates_after_the_first_ones() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/decode");
    let names = ["vorbis_32k_mono.ogg", "opus_48k_stereo.opus", "mp3_44k_stereo.mp3", "flac_48k_stereo.flac"];
    let recordings = names.map(|name| std::fs::read(data.join(name)).expect("the tests' recordings"));
    let (mut decoder, mut resamplers, mut fbank) = (Decoder::new(), Resamplers::new(), Fbank::default());
    let mut wave = vec![0.0; 5 * 48000 + 4096];
    let mut clip = vec![0.0; 2 * 32000];
    let mut mels = vec![0.0; 198 * 128];
    let mut before = 0;
    for round in 0..20u64 {
        if round == 3 {
            before = COUNT.get();
        }
        for bytes in &recordings {
            let info = decoder.info(bytes).expect("a whole recording");
            let resampler = resamplers.get(info.rate, 32000);
            let context = resampler.context();
            let n = 2 * info.rate as usize + 2 * context;
            decoder.read(bytes, &info, round * 7919, None, &mut wave[..n]).expect("a whole recording");
            resampler.process(&wave[..n], context, &mut clip);
            fbank.normalised(&clip, 198, &mut mels);
        }
    }
    assert_eq!(COUNT.get() - before, 0);
}
