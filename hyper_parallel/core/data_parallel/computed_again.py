"""Modules that backward recomputes and differentiates on its own, as MindSpore's ``recompute`` does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.data_parallel.places import Slot

__all__ = ["Inside"]


class Inside:
    """The modules inside of a unit that hold parameters of it, or contain some that do. It keeps none of them alive.

    Args:
        modules: the modules of the unit.
        slots: all slots of the unit.
        what: the unit, for messages.
    """

    def __init__(self, platform: Any, modules: Sequence[Any], slots: Sequence[Slot], what: str) -> None:
        self._differentiates_again, self._what = platform.differentiates_again, what
        self._modules: list[tuple[Any, str]] = []
        if self._differentiates_again is not None:
            holders = [(slot.root, f"{slot.path}.") for slot in slots]
            self._modules = [
                (weakref.ref(m), path)
                for i, module in enumerate(modules)
                for path, m in platform.named_modules(module)
                if path and any(root == i and holder.startswith(f"{path}.") for root, holder in holders)
            ]

    def check(self) -> None:
        """Raise ValueError where gradients of the unit's parameters would be lost.

        The recomputation asks for gradients of the shards. It reads whole parameters, which do not lead to the shards.
        """
        for ref, path in self._modules:
            module = ref()
            if module is not None and self._differentiates_again(module):
                raise ValueError(
                    f"{self._what}: {path!r} is computed again in backward, which gives no gradients of parameters "
                    f"that belong to a unit around it: apply fully_shard to {path!r} as well, before the module "
                    "around it, or call its recompute(use_reentrant=False)"
                )
