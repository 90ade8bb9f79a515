"""Moving data between ranks: collectives, their pairs of forward and backward, redistribution, lost ranks."""
