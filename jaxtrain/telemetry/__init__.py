"""Records of a run: metrics, writers, console, goodput, traces and the report."""
