"""Operations on distributed tensors: the choice of shardings, execution on local tensors, and layouts of results."""
