"""`Report`: the findings in a followed program, and operations that could not be followed, as text and as a dict."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.plain_code.findings import Finding

__all__ = ["Report"]


class Report:
    """A report on a program. ``print`` shows it. It is true if there are no findings.

    Attributes:
        findings: the findings in order of discovery, without duplicates.
        unknown: name of an operation that could not be followed -> number of calls.
        notes: fact that is not a finding -> number of times.
        asked: number of judged operations.
    """

    def __init__(self) -> None:
        self._found: dict[Finding, int] = {}
        self._reached: set[Finding] = set()
        self.unknown: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.asked = 0

    @property
    def findings(self) -> list[Finding]:
        """Return the findings in order of discovery."""
        return list(self._found)

    @property
    def reached(self) -> list[Finding]:
        """Return the findings that affect a styled module or the output of the model. Other findings affect values
        that the model does not use, such as a number for a log."""
        return [finding for finding in self._found if finding in self._reached]

    def __bool__(self) -> bool:
        return not self._found

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "right": bool(self),
            "findings": [{**vars(f), "used": f in self._reached, "times": n} for f, n in self._found.items()],
            "not_followed": self.unknown,
            "notes": self.notes,
            "asked": self.asked,
        }

    def lines(self) -> list[str]:
        """Return a line of text for each finding. Equal findings in several modules share a line."""
        equal: dict[tuple[str, str, str, str], list[Finding]] = {}
        for f in self._found:
            equal.setdefault((f.kind, f.where, f.text, f.remedy), []).append(f)
        lines = []
        for same in equal.values():
            more = f" (and in {len(same) - 1} more modules)" if len(same) > 1 else ""
            reached = any(f in self._reached for f in same)
            unused = "" if reached else " No module and no output of the model uses the result."
            lines.append(f"{same[0]}{more}{unused}")
        return lines

    def __str__(self) -> str:
        count = len(self.lines())
        first = f"{count or 'no'} finding{'s' * (count != 1)} in plain code, of {self.asked} operations"
        unknown = [f"not followed, {n} times: {name}" for name, n in self.unknown.items()]
        return "\n".join([first, *self.lines(), *unknown])

    __repr__ = __str__
