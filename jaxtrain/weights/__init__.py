"""Weights on disk, without devices: looking into them, and taking them to other formats."""
