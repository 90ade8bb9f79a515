"""Operators that are known to be wrong or to hang, with the reason: to be empty."""

from __future__ import annotations

__all__ = ["OPEN"]

#: backend -> operator -> why.
OPEN: dict[str, dict[str, str]] = {"torch-cpu": {}, "mindspore": {}}
