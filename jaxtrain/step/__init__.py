"""One training step: gradients, accumulation, update, and the state that it changes."""
