"""The contract is small: what a backend must bring, and what the others verbs answer of themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform import contract
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.collectives import CollectiveRole

CONTRACT = Path(contract.__file__).parent
#: What `Platform.factory` makes, which a string chooses.
FACTORIES = ("full", "empty", "rand", "randn")


def required() -> set[str]:
    """Verbs that a backend must bring."""
    return set(Platform.__abstractmethods__)


def test_at_most_fifty_verbs() -> None:
    doc = " ".join((Platform.factory.__doc__ or "").split())
    assert all(f'``"{name}"``' in doc for name in FACTORIES) and doc.count('``"') == len(FACTORIES)
    assert len(required()) - 1 + len(FACTORIES) <= 50


def test_core_calls_every_verb_that_is_required() -> None:
    core = CONTRACT.parents[1] / "core"
    # `full` through `zeros` and `ones`, which a backend may bring too.
    paths = [*core.rglob("*.py"), CONTRACT / "tensors.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert {verb for verb in required() if not re.search(rf"\.{verb}\b", text)} == set()


def test_a_role_is_on_two_screens() -> None:
    for path in CONTRACT.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200, path.name


class _Arrays:
    """What the verbs with an answer of their own rest on, for NumPy's arrays."""

    Tensor = np.ndarray

    def shape_of(self, x: np.ndarray) -> tuple[int, ...]:
        return x.shape

    def narrow(self, x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        return np.take(x, range(start, start + length), axis=dim)

    def full(self, shape: tuple[int, ...], value: float, like: np.ndarray) -> np.ndarray:
        return np.full(shape, value, like.dtype)

    def clone(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x)

    def detach(self, x: np.ndarray) -> np.ndarray:
        return x.view()

    def own_parameters(self, module: Any) -> dict[str, Any]:
        return {"weight": module, "bias": None}

    def autograd_function(self, forward: Any, backward: Any) -> Any:
        return lambda x: forward(None, x)


def plain() -> Any:
    """A platform with `_Arrays` in place of everything that is required."""
    methods = {verb: getattr(_Arrays, verb, lambda self, *args: None) for verb in required()}
    return type("Plain", (Platform,), {**methods, "Tensor": np.ndarray, "name": "plain"})()


def test_what_verbs_answer_of_themselves() -> None:
    platform, x = plain(), np.arange(12.0).reshape(4, 3)
    assert platform.unavailable_reason() is None
    assert platform.is_tensor(x) and not platform.is_tensor(3.0)
    assert not platform.is_meta(x)
    assert platform.native_group("tp") == "tp"
    assert platform.to_device(x) is x
    assert list(platform.named_parameters(x)) == [("weight", x)]
    assert [part.tolist() for part in platform.chunk(x, 2, 0)] == [x[:2].tolist(), x[2:].tolist()]
    assert platform.contiguous(x.T).flags.c_contiguous
    assert platform.zeros((2,), x).tolist() == [0.0, 0.0] and platform.ones((2,), x).tolist() == [1.0, 1.0]
    for dim, shape in ((0, (1, 4, 3)), (2, (4, 3, 1)), (-1, (4, 3, 1)), (-2, (4, 1, 3))):
        assert platform.unsqueeze(x, dim).shape == shape
    assert platform.requires_grad(x)
    alias = platform.alias(x)
    assert alias is not x and np.shares_memory(alias, x)
    with platform.no_grad():
        platform.write_cache(x, "key", x)
    assert platform.read_cache(x, "key") is None
    platform.clear_cache(x)


def test_a_backend_supports_what_it_brings() -> None:
    platform, x = plain(), np.zeros(2)
    assert platform.supports("all_gather", "", x)
    for verb, arguments in {
        "all_reduce": (x, "sum", None),
        "reduce_scatter": (x, "sum", None, 2),
        "all_to_all": (x, None, 2),
        "broadcast": (x, 0, None),
        "scatter": (x, [x], 0, None),
    }.items():
        assert not platform.supports(verb, "sum", x)
        with pytest.raises(TypeError, match=f"Plain brings no {verb}"):
            getattr(platform, verb)(*arguments)
    assert isinstance(platform, CollectiveRole)
