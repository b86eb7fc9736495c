"""The packages of loaders/ that each shipped workload may import, itself or through another one."""

LOADERS = {
    "audio_language": {"chat", "text"},  # chats are tokenised text and codes of sound
    "bird": {"audio"},
    "giblet": {"film", "audio"},  # the segments of a film are tables, as those of recordings are
    "language": {"text"},
    "trm": {"sudoku"},
}
