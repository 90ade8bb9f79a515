"""What commands print: text for people, or JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from hyper_parallel.debug.text import print_text

__all__ = ["UsageError", "show"]


class UsageError(Exception):
    """The command cannot do what it was asked for; the message says what to give."""


def show(text: str, data: Any, as_json: bool) -> None:
    """Print ``text``, or ``data`` as JSON."""
    if as_json:
        print(json.dumps(data, indent=2, default=str))
    else:
        print_text(text)
