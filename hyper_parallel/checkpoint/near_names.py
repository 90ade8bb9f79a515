"""Suggestions for names that are missing: present names that are nearly the same."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["near_name"]

#: How similar two names are, as difflib computes it, for one to be named in the message about the other.
_NEAR = 0.8


def near_name(name: str, names: Sequence[str]) -> str:
    """Return the part of a message about the nearest name, which is that of `difflib.get_close_matches`.

    That function compares each name in full that may be near enough. This one compares each that may be nearer than
    those before it.

    Args:
        name: that is missing.
        names: that are there.
    """
    matcher: difflib.SequenceMatcher[str] = difflib.SequenceMatcher()
    matcher.set_seq2(name)
    nearest = _NEAR, ""
    for other in names:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= nearest[0] and matcher.quick_ratio() >= nearest[0]:
            nearest = max(nearest, (matcher.ratio(), other))
    return f" (the checkpoint has {nearest[1]!r})" if nearest[1] else ""
