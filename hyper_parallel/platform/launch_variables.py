"""Numbers that launchers set in environment variables, for every backend."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["number_in", "rank_and_size"]


def number_in(environ: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    """Return the number in an environment variable of the launcher.

    Args:
        environ: the environment.
        name: name of the variable.
        default: value if the variable is missing; None if it must be set.
        least: minimum of the number.

    Raises:
        ValueError: for anything but an integer of at least ``least``.

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
            f"{name}={given!r} is invalid: the variable must be an integer of at least {least}. Start the program "
            "with torchrun or msrun, or unset all variables of the launcher to run on one rank"
        )
    return number


def rank_and_size(environ: Mapping[str, str], rank: str, size: str, default: int | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    Args:
        environ: the environment.
        rank: name of the variable of the rank.
        size: name of the variable of the number of ranks.
        default: the rank if the variable is missing.

    Raises:
        ValueError: when a value is no number, or the rank is not below the size.
    """
    number, count = number_in(environ, rank, default), number_in(environ, size, least=1)
    if number >= count:
        raise ValueError(
            f"{rank}={number} and {size}={count}: ranks are 0 to {count - 1}. Set a different rank for each process"
        )
    return number, count
