"""The picture of losses at the end of the demo."""

from __future__ import annotations

from examples.train_llama.picture import HEIGHT, WIDTH, picture_of


def test_equal_losses_are_one_curve() -> None:
    lines = picture_of([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]).splitlines()
    assert len(lines) == HEIGHT + 2
    assert lines[0] == "    3.00 | *" and lines[HEIGHT - 1] == "    1.00 |   *"
    assert sum(line.count("*") for line in lines[:HEIGHT]) == 3


def test_other_losses_are_two_curves() -> None:
    text = picture_of([2.0] * 200, [1.0] * 200, first_step=100)
    lines = text.splitlines()
    assert lines[0].endswith("o" * WIDTH) and lines[HEIGHT - 1].endswith("." * WIDTH)
    assert lines[HEIGHT].split() == ["step", "101", "300"]


def test_one_loss() -> None:
    assert "1.50 | *" in picture_of([1.5], [1.5])
