"""Random programs, chains of operations and stacks of modules, on one device and distributed: docs/fuzzing.md."""
