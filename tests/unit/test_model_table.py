"""docs/huggingface.md has the table that its generator makes of the record of runs."""

from __future__ import annotations

import json

from tests.support.model_table import PAGE, RECORD, SIZES_RECORD, SIZES_TOLERANCE, TOLERANCE, with_table


def test_the_page_is_what_the_generator_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    record, sizes = (json.loads(path.read_text(encoding="utf-8")) for path in (RECORD, SIZES_RECORD))
    assert with_table(page, record, sizes) == page, "write it anew: python -m tests.support.model_table --page"


def test_the_record_has_forty_models_with_gradients_and_shares() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert len(record) >= 40
    for title, row in record.items():
        assert set(row["ranks"]) >= {"2", "4"}, title
        for found in row["ranks"].values():
            assert found["count"] > 0 and max(found["loss"], found["gradients"]) < TOLERANCE, title
            assert 0.5 < found["sharded"] <= 1, title


def test_the_record_of_sizes_has_the_published_numbers_of_parameters() -> None:
    sizes = json.loads(SIZES_RECORD.read_text(encoding="utf-8"))
    assert len(sizes) >= 15
    for title, row in sizes.items():
        assert abs(row["billions"] / row["published"] - 1) < SIZES_TOLERANCE, title
        assert 0 < row["sharded"] <= 1 and row["rank_gib"] * row["ranks"] >= row["billions"] * 2e9 / 2**30, title
