"""What tests share: a pool of worker processes, and helpers for the jobs that run in it."""
