"""Random programs of trainers, which save, write, select and load values between steps. See docs/fuzzing.md."""
