"""Using a trained model: embeddings of recordings, how good they are, and sound from prompts."""
