"""Sizes of the models."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LlamaSizes", "MlpSizes"]


@dataclass(frozen=True)
class MlpSizes:
    """Sizes of an MLP and its input (batch, features)."""

    batch: int = 4
    features: int = 16
    hidden: int = 32

    def __str__(self) -> str:
        return f"{self.batch}x{self.features}x{self.hidden}"


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a block, its input (batch, sequence, features), and of the cache that a decoding step reads."""

    batch: int = 2
    sequence: int = 8
    features: int = 16
    hidden: int = 32
    heads: int = 4
    cached: int = 7

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.features // self.heads

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, sequence {self.sequence}, features {self.features}, hidden {self.hidden}, "
            f"{self.heads} heads"
        )
