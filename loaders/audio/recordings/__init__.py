"""Recordings as people have them, and what is written of them: an index that the loader reads. See docs/recordings.md.

annotations  what a source says of a recording, and the list of mistakes
tables       text with columns, whatever its separator and encoding
sources      folders, tables, metadata: annotations of each kind of source
find         the file that a table's name means
headers      rate, length, date and place of recordings, read once and kept
classes      names and their synonyms
rows         annotations to rows: windows, overlap, splits
store        the folder of an index: written whole or not at all
show         what is in one
"""
