"""Patches of Dynamo, torch's compiler: guards, and DTensors as it sees them."""
