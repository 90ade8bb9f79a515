"""Communication between ranks: collectives, differentiable steps, redistribution and errors for lost ranks."""
