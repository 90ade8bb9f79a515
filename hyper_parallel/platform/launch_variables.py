"""Numbers that launchers put into the environment, for every backend."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["number_in", "rank_and_size"]


def number_in(environ: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    """Return the number that a launcher has set.

    Args:
        environ: the environment.
        name: of the variable.
        default: where there is none; with None there is one.
        least: that it may be.

    Raises:
        ValueError: for anything but a whole number from ``least``.

    Example:
        >>> number_in({"RANK": "3"}, "RANK"), number_in({}, "LOCAL_RANK", 0)
        (3, 0)
    """
    given = environ[name] if default is None else environ.get(name, str(default))
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(
            f"{name}={given!r}: launchers set a whole number from {least}. Start the program with torchrun or msrun, "
            "or set the variable as they do, or unset all of theirs to run alone"
        )
    return number


def rank_and_size(environ: Mapping[str, str], rank: str, size: str, default: int | None = None) -> tuple[int, int]:
    """Return the rank of this process and how many there are.

    Args:
        environ: the environment.
        rank: the variable of the rank.
        size: that of the number of ranks.
        default: the rank where none is set.

    Raises:
        ValueError: when one is no number, or there is no such rank.
    """
    number, count = number_in(environ, rank, default), number_in(environ, size, least=1)
    if number >= count:
        raise ValueError(
            f"{rank}={number} and {size}={count}: ranks are 0 to {count - 1}. Give each process a rank of its own"
        )
    return number, count
