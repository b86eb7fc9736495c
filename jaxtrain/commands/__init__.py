"""What users run: one file a command, listed in the table of `jaxtrain.cli`."""
