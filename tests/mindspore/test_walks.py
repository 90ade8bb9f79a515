"""The walks in docs/architecture.md are those of a real step."""

from __future__ import annotations

from typing import Any

from tests.support import walks


def test_walks(pool: Any) -> None:
    walks.check(pool, "mindspore")
