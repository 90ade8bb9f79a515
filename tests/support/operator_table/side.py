"""The interface that the table needs of a framework, and how it finds that of one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = ["Call", "Side", "side_of"]


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        args, kwargs: its arguments: trees with plain tensors.
        forms: "forward" (and "method", "in place" where there are such forms) -> function of the arguments. One in
            place writes its first argument and returns nothing of interest.
        differentiable: whether gradients are compared.
        compared: "values" with one device; "ranks" with one another, for random numbers that no seed controls; "shapes"
            and dtypes, for uninitialised results.
        unsteady: "forward" where the framework's own result differs from call to call, "backward" where its gradient
            does: there is nothing to compare with.
    """

    args: tuple
    kwargs: dict[str, Any]
    forms: dict[str, Callable[..., Any]]
    differentiable: bool = True
    compared: str = "values"
    unsteady: str = ""


class Side(Protocol):
    """One framework's operators."""

    #: Where the operators come from, for the page.
    TITLE: str

    #: Operators of which the framework's own backward takes a "transposed" cotangent for a row-major one.
    READS_ROW_MAJOR: Collection[str]

    def names(self) -> list[str]:
        """The operators."""

    def calls(self, name: str, count: int) -> list[Call]:
        """Samples for at most ``count`` calls of the operator ``name``, the same on every rank."""

    def seed(self) -> None:
        """Seed the framework's generators."""

    def is_tensor(self, x: Any) -> bool:
        """Return whether ``x`` is a plain or distributed tensor that can be compared."""

    def array(self, x: Any) -> np.ndarray:
        """The value of a plain tensor."""

    def tensor(self, array: np.ndarray, like: Any) -> Any:
        """A plain tensor of the dtype of ``like``."""

    def differentiate(
        self, run: Callable[[list[Any]], tuple[list[Any], Any]], tensors: Sequence[Any], places: Sequence[int]
    ) -> tuple[list[Any], list[np.ndarray | None]]:
        """``run(tensors)`` gives outputs and a loss (or None): the outputs, and the loss's gradients by the tensors at
        ``places``."""

    def copied(self, x: Any) -> Any:
        """A copy that may be written to."""

    def requires_grad(self, x: Any) -> bool:
        """Return whether gradients by the sample's tensor ``x`` are wanted."""

    def can_be_partial(self, x: Any) -> bool:
        """Return whether ``x`` is also tried as a partial sum."""

    def weight_like(self, y: Any) -> Any:
        """A tensor of the dtype of a factor of ``y``."""

    def loss(self, outputs: Sequence[Any], weigh: Callable[[Any], Any], way: str) -> Any:
        """The sum over the differentiable ``outputs`` y, None when there are none. Each term is y times ``weigh(y)``,
        so that cotangents are "dense". Or it is y alone, so that they are "stretched" from one number. Or it is y with
        its dimensions in reverse order times weights, so that they are "transposed"."""


def side_of(platform: str) -> Side:
    """The side of a backend; to be called in a worker, since it imports the framework."""
    framework = platform.split("-")[0]
    return importlib.import_module(f"tests.{framework}.operators")  # type: ignore[return-value]
