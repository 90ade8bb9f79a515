"""Checks of code on plain tensors between styled modules: how each tensor is placed, by the sharding rules."""
