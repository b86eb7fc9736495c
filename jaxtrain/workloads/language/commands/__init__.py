"""The commands of this workload, one file each."""
