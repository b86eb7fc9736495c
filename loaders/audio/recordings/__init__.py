"""An index, which the loader reads, of people's own recordings and annotations.

See docs/recordings.md.

annotations  the annotations of a source, and the list of mistakes
tables       text with columns, of any separator and encoding
columns      the columns of a table by their meaning
wide         columns that are classes, of 0 and 1
sources      folders, tables, metadata: annotations of each kind of source
find         the file that a table's name means
headers      rate, length, date and place of recordings, read once and kept
classes      names and their synonyms
rows         annotations to rows: windows, overlap, splits
store        the folder of an index: written whole or not at all
show         the contents of an index
"""
