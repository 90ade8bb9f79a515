"""The operators of torch: its own database of operators with samples of their arguments."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tests.support.operator_table.side import Call
from tests.support.operator_table.trees import leaves_of, mapped

TITLE = "`op_db`, the database of operators that torch tests itself with"

#: Dtypes of the samples, one after the other and again: the first in each row that an operator takes.
_FLOAT = (torch.float64, torch.float32, torch.int64, torch.complex128, torch.bool)
_DTYPES = (_FLOAT, _FLOAT, (torch.complex128,), (torch.int64,), (torch.bool,), _FLOAT)
#: Results of these are not initialised.
_EMPTY = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_"}
READS_ROW_MAJOR: frozenset[str] = frozenset()
#: Compiled at run time for a GPU.
_GPU_ONLY = ("jiterator_",)
_SEED = 1234


@functools.cache
def _database() -> dict[str, Any]:
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # The base class of torch's own tests, of which none runs here.
            stand_in: Any = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, Any] = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        found.setdefault(name, op)
    return found


def names() -> list[str]:
    return [name for name in _database() if not name.startswith(_GPU_ONLY)]


def calls(name: str, count: int) -> list[Call]:
    op = _database()[name]
    found: list[Call] = []
    rows = [_DTYPES[number % len(_DTYPES)] for number in range(count)]
    dtypes = [next((d for d in row if d in op.dtypes), None) for row in rows]
    for dtype in dict.fromkeys(dtypes):
        if dtype is not None:
            found += _calls_of(op, dtype, dtypes.count(dtype), "shapes" if name in _EMPTY else "values")
    return found


def _calls_of(op: Any, dtype: torch.dtype, count: int, compared: str) -> list[Call]:
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    found = []
    # `op.sample_inputs` looks for a test in the frames above it, which takes longer than all the rest here.
    for sample in itertools.islice(_seeded(op.sample_inputs_func(op, "cpu", dtype, differentiable)), 4 * count):
        args, kwargs = _plain((sample.input, *sample.args)), _plain(sample.kwargs)
        if any(is_tensor(x) for x in leaves_of((args, kwargs))):
            found.append(Call(args, kwargs, _forms(op), differentiable, compared))
    # The first samples often differ by little: take some from everywhere.
    step = max(1, len(found) // count)
    return found[::step][:count]


def _seeded(samples: Iterable[Any]) -> Iterator[Any]:
    """The samples, each drawn from the same seed, as those of `op.sample_inputs` are."""
    remaining = iter(samples)
    while True:
        for set_seed in (torch.manual_seed, np.random.seed, random.seed):
            set_seed(_SEED)
        try:
            yield next(remaining)
        except StopIteration:
            return


def _plain(tree: Any) -> Any:
    return mapped(tree, lambda x: _rounded(x) if isinstance(x, torch.Tensor) else x)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """A leaf with the value of ``x`` to 24 binary places. Sums of a few such numbers are exact, so that a partial sum
    has the same value as the whole. Functions with jumps (``floor``, ``==``) then jump at the same place."""
    requires_grad = x.requires_grad
    x = x.detach()
    if x.layout is torch.strided and x.dtype in (torch.float64, torch.complex128):
        real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        near = (real * 2**24).round() / 2**24
        real = torch.where(real.abs() < 2**12, near, real)
        x = torch.view_as_complex(real) if x.is_complex() else real
    return x.clone().requires_grad_(requires_grad)


def _forms(op: Any) -> dict[str, Callable[..., Any]]:
    forms = {"forward": op.op}
    if op.method_variant is not None:
        forms["method"] = op.method_variant
    if op.inplace_variant is not None:
        forms["in place"] = op.inplace_variant
    if op.supports_out:
        forms["out="] = _into(op.op, op.name not in _EMPTY)
    return forms


def _into(func: Callable[..., Any], compared: bool) -> Callable[..., Any]:
    """``func(..., out=x)`` with an ``x`` that is placed as the result is."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = func(*args, **kwargs)
            out = mapped(result, torch.zeros_like)
            seed()
            func(*args, **kwargs, out=out)
            for x, y in zip(leaves_of(result), leaves_of(out), strict=True):
                if compared and type(y) is torch.Tensor and not torch.allclose(x, y, equal_nan=True):
                    raise ArithmeticError("torch's own out= is not the result")  # ihfftn of torch 2.15
            return out

    return call


def seed() -> None:
    torch.manual_seed(_SEED)


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().resolve_conj().resolve_neg()
    return x.float().numpy() if x.dtype in (torch.bfloat16,) else x.numpy()


def tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(like.dtype)


def requires_grad(x: torch.Tensor) -> bool:
    return x.requires_grad


def differentiate(
    run: Callable[[list[Any]], tuple[list[Any], Any]], tensors: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], list[np.ndarray | None]]:
    inputs = [x.detach().clone().requires_grad_(i in places) for i, x in enumerate(tensors)]
    outputs, loss = run(inputs)
    if loss is None or not places or not loss.requires_grad:
        return outputs, []
    grads = torch.autograd.grad(loss, [inputs[i] for i in places], allow_unused=True)
    return outputs, [None if g is None else array(g) for g in grads]


def loss(outputs: Sequence[Any], weigh: Callable[[Any], Any], way: str) -> Any:
    terms = []
    for y in outputs:
        if y.requires_grad and (y.is_floating_point() or y.is_complex()):
            y = y.permute([*reversed(range(y.dim()))]) if way == "transposed" else y
            term = y.sum() if way == "stretched" else (y * weigh(y)).sum()
            terms.append(term.real if term.is_complex() else term)
    return functools.reduce(torch.add, terms) if terms else None


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy that may be written to, and leads back to ``x``."""
    return x.clone()


def weight_like(y: Any) -> Any:
    """A tensor of the dtype of a weight for ``y``."""
    return torch.empty((), dtype=torch.float64 if y.dtype in (torch.float64, torch.complex128) else torch.float32)


def can_be_partial(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float64, torch.float32, torch.int64, torch.complex128)
