"""Processes and their messages: launch, stores, groups, collectives, lost ranks."""
