"""Checks of code on plain tensors between styled modules. The sharding rules determine the placement of each tensor."""
