"""The framework-independent part of HyperParallel. It uses a framework only via `hyper_parallel.platform`."""
