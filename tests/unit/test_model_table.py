"""docs/huggingface.md has the table that its generator makes of the record of runs."""

from __future__ import annotations

import json

from tests.support.model_table import PAGE, RECORD, TOLERANCE, with_table


def test_the_page_is_what_the_generator_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert with_table(page, record) == page, "write it anew: python -m tests.support.model_table --page"


def test_the_record_has_forty_models_with_gradients_and_shares() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert len(record) >= 40
    for title, row in record.items():
        assert set(row["ranks"]) >= {"2", "4"}, title
        for found in row["ranks"].values():
            assert found["count"] > 0 and max(found["loss"], found["gradients"]) < TOLERANCE, title
            assert 0.5 < found["sharded"] <= 1, title
