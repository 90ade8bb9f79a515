"""Names and messages in a form that is safe to print on a terminal: control characters are escaped."""

from __future__ import annotations

__all__ = ["printable", "printable_lines"]


def printable(text: object) -> str:
    r"""Escape, as in Python, the characters of ``text`` that control a terminal, end a line, or are invisible.

    Example:
        >>> printable("layer\x1b[2J\n"), printable("ä b")
        ('layer\\x1b[2J\\n', 'ä b')
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in said)


def printable_lines(text: object) -> str:
    r"""Make a text of several lines `printable`, line by line.

    Example:
        >>> printable_lines("two\nlines\r")
        'two\nlines\\r'
    """
    return "\n".join(map(printable, str(text).split("\n")))
