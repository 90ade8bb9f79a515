"""Modules that backward computes again and differentiates on its own, as MindSpore's ``recompute`` does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.data_parallel.places import Slot

__all__ = ["Inside"]


class Inside:
    """The modules inside of a unit that hold parameters of it, or contain some that do. It keeps none of them alive.

    Args:
        module: that of the unit.
        slots: all of the unit.
        what: the unit, for messages.
    """

    def __init__(self, platform: Any, module: Any, slots: Sequence[Slot], what: str) -> None:
        self._differentiates_again, self._what = platform.differentiates_again, what
        self._modules: list[tuple[Any, str]] = []
        if self._differentiates_again is not None:
            paths = [f"{slot.path}." for slot in slots]
            self._modules = [
                (weakref.ref(m), path)
                for path, m in platform.named_modules(module)
                if path and any(holder.startswith(f"{path}.") for holder in paths)
            ]

    def check(self) -> None:
        """Raise ValueError where gradients of the unit's parameters would be lost: they would be asked of the shards,
        and the whole parameters that are read when it is computed again do not lead there."""
        for ref, path in self._modules:
            module = ref()
            if module is not None and self._differentiates_again(module):
                raise ValueError(
                    f"{self._what}: {path!r} is computed again in backward, which gives no gradients of parameters "
                    f"that belong to a unit around it: apply fully_shard to {path!r} as well, before the module "
                    "around it, or call its recompute(use_reentrant=False)"
                )
