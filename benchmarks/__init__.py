"""What parallel models cost against hand-written code: ``python -m benchmarks``, explained in README.md."""
