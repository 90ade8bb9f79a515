"""Random programs of trainers: what is kept, written, chosen, saved and loaded around steps; docs/fuzzing.md."""
