"""Random programs of trainers: values are kept, written, chosen, saved and loaded around steps; docs/fuzzing.md."""
