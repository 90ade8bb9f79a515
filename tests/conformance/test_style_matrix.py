"""See `tests.conformance`. The table in docs/styles.md has the counts of the checks."""

from pathlib import Path

from hyper_parallel.testing.conformance.test_style_matrix import *
from hyper_parallel.testing.conformance.test_style_matrix import table


def test_table_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "styles.md").read_text()
    assert "\n".join(table()) in text
