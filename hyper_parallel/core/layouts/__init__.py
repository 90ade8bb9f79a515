"""Layouts: the shard of a distributed tensor that each rank holds, and its order in memory."""
