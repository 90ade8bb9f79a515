"""Processes and their communication: launch, stores, groups, collectives, lost ranks."""
