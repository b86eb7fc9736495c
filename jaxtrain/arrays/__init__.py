"""Stored arrays, read and written without the model: Orbax steps, safetensors, cards, the Hub."""
