"""Report of a run of the conformance suite, as text, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Failure", "Group", "Report"]


@dataclass
class Group:
    """One file of checks."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass
class Failure:
    """A failed check: its name in pytest, and pytest's text about it."""

    check: str
    message: str


@dataclass
class Report:
    """The result of a run of the suite.

    Attributes:
        backend: name of the backend.
        device_type: device type of its meshes.
        comm_backend: communication backend of its groups.
        adapter: name of the adapter module.
        versions: versions of the library, Python, NumPy and the framework.
        world_sizes: requested numbers of ranks.
        complete: whether all checks were requested.
        groups: groups of checks, by the name of their file.
        failures: one entry for each failed check.
        skip_reasons: reason -> number of skipped checks.
        seconds: duration of the run.
    """

    backend: str
    device_type: str
    comm_backend: str
    adapter: str
    versions: dict[str, str]
    world_sizes: list[int]
    complete: bool
    groups: dict[str, Group] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    skip_reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def group(self, name: str) -> Group:
        """Return the group ``name``. A new group is added to the table."""
        return self.groups.setdefault(name, Group(name))

    @property
    def passed(self) -> int:
        """Return the number of checks that passed."""
        return sum(group.passed for group in self.groups.values())

    @property
    def failed(self) -> int:
        """Return the number of checks that failed."""
        return sum(group.failed for group in self.groups.values())

    @property
    def skipped(self) -> int:
        """Return the number of checks that were skipped."""
        return sum(group.skipped for group in self.groups.values())

    @property
    def verdict(self) -> str:
        """Return the result in one sentence. A run in which no check passed is not a success."""
        if self.failed:
            return f"{self.backend} does not conform: {self.failed} of {self.passed + self.failed} checks failed"
        if not self.passed:
            return f"{self.backend} was not checked: no check ran"
        if not self.complete:
            return f"{self.backend} passes the checks that were asked for; not all were"
        return f"{self.backend} conforms"

    @property
    def ok(self) -> bool:
        """Return whether checks ran and none failed."""
        return bool(self.passed) and not self.failed

    def _rows(self) -> list[tuple[str, int, int, int]]:
        rows = [(g.name, g.passed, g.failed, g.skipped) for _, g in sorted(self.groups.items())]
        return [*rows, ("total", self.passed, self.failed, self.skipped)]

    def _about(self) -> list[tuple[str, str]]:
        return [
            ("device", f"{self.device_type} ({self.comm_backend})"),
            ("adapter", self.adapter),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
            ("world sizes", ", ".join(map(str, self.world_sizes))),
            ("seconds", f"{self.seconds:.0f}"),
        ]

    def to_text(self) -> str:
        """Return the table for a terminal, followed by the verdict."""
        from hyper_parallel.debug.text import format_table  # pytest's plugin imports this module, and must stay light

        lines = [format_table(("check group", "passed", "failed", "skipped"), self._rows(), right=(1, 2, 3))]
        lines += [f"skipped, {count}: {reason}" for reason, count in sorted(self.skip_reasons.items())]
        lines += ["", f"{self.verdict} ({', '.join(f'{name} {value}' for name, value in self._about()[:2])})"]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Return the report in Markdown: the facts about the run, the table, and pytest's text of each failure."""
        lines = [f"# Conformance of {self.backend}", "", f"{self.verdict}.", ""]
        lines += [f"* {name}: {value}" for name, value in self._about()]
        lines += ["", "| check group | passed | failed | skipped |", "|---|---:|---:|---:|"]
        lines += [f"| {name} | {p} | {f} | {s} |" for name, p, f, s in self._rows()]
        if self.skip_reasons:
            lines += ["", "Skipped:", ""]
            lines += [f"* {count}: {reason}" for reason, count in sorted(self.skip_reasons.items())]
        for failure in self.failures:
            # A fence longer than any in the message: models and documents in it may have some.
            lines += ["", f"## {failure.check}", "", "`````", failure.message.strip(), "`````"]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Return all results as JSON, with totals and verdict."""
        totals = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        content = {**asdict(self), "groups": [asdict(g) for _, g in sorted(self.groups.items())]}
        return json.dumps({**content, "totals": totals, "ok": self.ok, "verdict": self.verdict}, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the report as JSON or Markdown, depending on the suffix."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_markdown(), encoding="utf-8")
