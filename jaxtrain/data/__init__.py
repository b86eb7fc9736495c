"""Batches on devices: the feed of sharded arrays, and the stream that the loop sees."""
