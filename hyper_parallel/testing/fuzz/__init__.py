"""Random programs, run on one device and distributed: operations, modules, trainers. See docs/fuzzing.md."""
