"""Patches of torch's compiler (Dynamo): its guards, and its treatment of DTensors."""
