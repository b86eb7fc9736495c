"""Embeddings, heads, detections, search and review with a trained encoder."""
