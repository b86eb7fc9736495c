"""One file, one workload. The config names it by its dotted path; nothing lists them."""
