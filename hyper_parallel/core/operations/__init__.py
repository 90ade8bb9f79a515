"""Operations on distributed tensors: which shards they may run on, what they give, and how they are run."""
