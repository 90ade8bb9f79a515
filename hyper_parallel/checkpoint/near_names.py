"""Suggestions for missing names: similar names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["near_name"]

#: Minimum similarity of a suggested name to the missing one, as difflib computes it.
_NEAR = 0.8


def near_name(name: str, names: Sequence[str]) -> str:
    """Return the part of a message that suggests the most similar name, as `difflib.get_close_matches` finds it.

    Unlike `difflib`, this function skips names that cannot be more similar than the best name so far.

    Args:
        name: the missing name.
        names: the existing names.
    """
    matcher: difflib.SequenceMatcher[str] = difflib.SequenceMatcher()
    matcher.set_seq2(name)
    nearest = _NEAR, ""
    for other in names:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= nearest[0] and matcher.quick_ratio() >= nearest[0]:
            nearest = max(nearest, (matcher.ratio(), other))
    return f" (the checkpoint has {nearest[1]!r})" if nearest[1] else ""
