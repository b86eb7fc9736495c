"""Pure layer functions that workloads share."""
