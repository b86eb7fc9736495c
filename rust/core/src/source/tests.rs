use super::*;

impl Index {
    /// An index of n recordings that lie outside their shard, which `open` would refuse. Reading one panics.
    pub(crate) fn broken(n: usize) -> Self {
        let map = memmap2::MmapMut::map_anon(1).and_then(memmap2::MmapMut::make_read_only).unwrap();
        let progress = CopyProgress::complete();
        let table = Table::Arrow {
            audio: vec![Span { start: 10, len: 10 }; n],
            paths: vec![Span::NULL; n],
        };
        Self {
            shards: vec![Shard { path: "broken.arrow".into(), map, progress, first_row: 0, table }],
            labels: vec![-1; n],
            ..Self::default()
        }
    }
}
