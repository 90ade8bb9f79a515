"""The communication of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Traffic", "differences"]


@dataclass
class Traffic:
    """Collectives that one rank issued.

    Attributes:
        counts: name -> how many.
        sizes: name -> bytes of the tensors that this rank gave to them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of all."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        return ", ".join(f"{n} {name} ({self.sizes[name]} B)" for name, n in sorted(self.counts.items())) or "none"

    def record(self, name: str, size: int) -> None:
        """Count one collective of ``size`` bytes."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self.sizes[name] = self.sizes.get(name, 0) + size


def differences(mine: Sequence[Traffic], theirs: Sequence[Traffic]) -> int:
    """Count the kinds of collectives that differ in number or in bytes, pass by pass."""
    return sum(
        a.counts.get(name) != b.counts.get(name) or a.sizes.get(name) != b.sizes.get(name)
        for a, b in zip(mine, theirs, strict=True)
        for name in a.counts.keys() | b.counts.keys()
    )
