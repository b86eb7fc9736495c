"""Audio: shards of encoded sound to padded, normalised spectrograms."""
