"""Devices and processes: layouts, kernels, clusters, and the lease of a workdir."""
