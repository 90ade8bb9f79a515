"""DTensors and distributed parameters, and stand-ins for parameters while a cell runs."""
