"""Files, columns, caches and cores: reading and writing that knows no kind of data."""
