"""Data parallelism: `fully_shard`, a first version for one module that is one unit."""
