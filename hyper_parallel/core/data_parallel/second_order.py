"""Gradients of gradients: on some backends those of inputs pass; those of parameters are refused."""

from __future__ import annotations

from hyper_parallel.platform.contract import Platform

__all__ = ["refuse_second_order"]


def refuse_second_order(platform: Platform, what: str) -> None:
    """Raise RuntimeError in a backward that is recorded: on all ranks, whichever parameters each of them has used.

    Args:
        platform: platform of the module.
        what: name of the function that was applied to it.
    """
    if platform.backward_is_recorded():
        passes = "ask in a backward with create_graph for gradients of inputs alone"
        raise RuntimeError(
            f"gradients of gradients do not go through {what}: "
            f"{passes if platform.tells_beginning else 'leave them out'}, or do not apply it to the modules that they "
            "go through"
        )
