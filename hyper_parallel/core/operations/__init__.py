"""Operations on distributed tensors: which shards they may run on, their results, and how they are run."""
