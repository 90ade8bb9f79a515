"""Every operator in torch's own database, distributed: none gives another number than one device, and none hangs."""

from __future__ import annotations

from typing import Any

from tests.support.operator_table.checks import none_wrong


def test_no_operator_is_wrong(pool: Any) -> None:
    none_wrong(pool, at_least=600)
