"""Verbs that make MindSpore faster than the contract requires: see `hyper_parallel.platform.contract.fast`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspore import mint, nn

from hyper_parallel.platform.contract import Fast
from hyper_parallel.platform.mindspore.gradients.autograd import FastAutograd

__all__ = ["MindSporeFast"]


class MindSporeFast(FastAutograd, Fast):
    """`Platform.fast` of MindSpore; ``platform`` is its owner."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def norm_call(self, module: Any) -> Callable[[Any, Any, Any], Any] | None:
        return _layer_norm if type(module) is nn.LayerNorm else None

    def is_plain_linear(self, module: Any) -> bool:
        return type(module) is mint.nn.Linear or (type(module) is nn.Dense and not module.activation_flag)

    linear: Any = staticmethod(mint.nn.functional.linear)


def _layer_norm(module: Any, x: Any, own: Mapping[str, Any]) -> Any:
    return module.layer_norm(x, own["gamma"].astype(x.dtype), own["beta"].astype(x.dtype))[0]
