"""HyperParallel without any framework: everything here speaks to `hyper_parallel.platform`."""
