"""Data loaders: numpy in, numpy out. Nothing here imports jax or jaxtrain."""
