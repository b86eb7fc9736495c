"""An index, which the loader reads, of people's own recordings. See docs/recordings.md."""
