"""Costs of parallel models against hand-written code: ``python -m benchmarks``, explained in README.md."""
