"""Data parallelism: `fully_shard` (ZeRO-3) and `replicate`, alone or on top of tensor parallelism."""
