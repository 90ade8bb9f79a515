"""`register_sharding` of functions that never ask for a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import register_sharding
from hyper_parallel.platform.torch.basics.tensor import HANDLERS
from hyper_parallel.platform.torch.op_table import OP_TABLE


def rule(shapes: tuple, static_args: tuple) -> Any:
    """A rule that is never asked."""
    return None


def test_rules_that_would_never_be_asked_are_refused() -> None:
    for function in [torch.outer, torch.Tensor.backward, F.mse_loss, torch._foreach_add, *HANDLERS]:
        reason = (
            "has a sharding rule already"
            if function in OP_TABLE
            else r"would never be called: .* handles this function"
        )
        with pytest.raises(ValueError, match=reason):
            register_sharding(function, rule)
    with pytest.raises(ValueError, match=r"would never be called: .* use the operation that returns a tensor"):
        register_sharding(torch.Tensor.addr_, rule)
