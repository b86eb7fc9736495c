"""Make the shards in this folder, which rust/core/tests/broken.rs damages: python
tests/data/shards/make.py"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent
AUDIO = pa.struct({"bytes": pa.binary(), "path": pa.string()})
ROWS = [b"first", b"", b"third recording" * 9, None, b"first", b"sixth" * 5]
NAMES = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}

audio = pa.array([{"bytes": data, "path": f"{i}.wav"} for i, data in enumerate(ROWS)], AUDIO)
schema = pa.schema({"audio": AUDIO, "label": pa.int64()}).with_metadata(
    {"huggingface": json.dumps(NAMES)}
)
table = pa.table([audio, pa.array([0, None, 1, 1, 0, 1])], schema=schema)

for name, make in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
    with make(str(HERE / f"{name}.arrow"), schema) as writer:
        writer.write_table(table, max_chunksize=4)
for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
    for version, dictionary in (("1.0", True), ("2.0", False)):
        name = f"{codec}_{'dictionary' if dictionary else 'plain'}.parquet"
        options = {
            "data_page_version": version,
            "use_dictionary": dictionary,
            "store_schema": False,
        }
        pq.write_table(
            table,
            HERE / name,
            compression=codec,
            row_group_size=4,
            write_statistics=False,
            **options,
        )
