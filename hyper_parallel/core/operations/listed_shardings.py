"""Shardings of an operation that are listed as placements, as torch's ``register_sharding`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.layouts.placement_types import Placement, own_placements
from hyper_parallel.core.operations.operands import DTENSOR_CLASSES, name_of
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.platform import Platform
from hyper_parallel.platform.contract import NativeOp

__all__ = ["TensorSpec", "listed_op", "listed_rule", "plain"]


class TensorSpec(NamedTuple):
    """Shape and dtype of a global tensor, passed to a function that lists shardings.

    Attributes:
        shape: global shape.
        dtype: dtype of the framework.
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the size of a dimension, or the shape, as the method ``size`` of a tensor does."""
        return self.shape if dim is None else self.shape[dim]


class _Slot(NamedTuple):
    """The position of a tensor among the operands."""

    at: int


def listed_op(name: str, platform: Platform) -> NativeOp:
    """Return an entry of the op table for an operation with listed shardings.

    Operands are the tensors among the arguments, also inside lists. Static arguments are all other arguments, and the
    dtypes.
    """

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        operands: list[Any] = []

        def slot(value: Any) -> Any:
            if platform.is_tensor(value):
                operands.append(value)
                return _Slot(len(operands) - 1)
            if isinstance(value, (list, tuple)):
                return type(value).__name__, tuple(map(slot, value))
            return value

        template = tuple(map(slot, args)), tuple((key, slot(value)) for key, value in kwargs.items())
        with platform.no_dispatch():
            return tuple(operands), (template, tuple(x.dtype for x in operands))

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        args, kwargs = filled(static_args[0], plain(operands, platform))
        return func(*args, **kwargs)

    return NativeOp(name, bind, call)


def plain(operands: Sequence[Any], platform: Platform) -> tuple[Any, ...]:
    """Return local operands as plain tensors.

    A user-defined backward reads its saved tensors with interception on, so they have the DTensor class.
    """
    return tuple(platform.alias(x) if type(x) in DTENSOR_CLASSES else x for x in operands)


def filled(template: tuple, operands: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call, with ``operands`` in place of its tensors."""

    def fill(value: Any) -> Any:
        if isinstance(value, _Slot):
            return operands[value.at]
        if isinstance(value, tuple) and len(value) == 2 and value[0] in ("list", "tuple"):
            return (list if value[0] == "list" else tuple)(map(fill, value[1]))
        return value

    args, kwargs = template
    return tuple(map(fill, args)), {key: fill(value) for key, value in kwargs}


def listed_rule(
    op: Any, function: Callable[..., Sequence[tuple[Sequence, Sequence]]], platform: Platform
) -> Callable[[tuple, tuple], OpSharding | None]:
    """Return the rule made of ``function``.

    ``function`` returns one pair for each sharding of ``op`` on one mesh dimension. A pair is (placements of the
    results, placements of the arguments).
    """

    def rule(shapes: tuple, static_args: tuple) -> OpSharding | None:
        template, dtypes = static_args
        specs = [TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        results = _result_shapes(op, template, specs, platform)
        if results is None:
            return None
        args, kwargs = filled(template, specs)
        flat = [*_flat(args), *_flat(tuple(kwargs.values()))]
        choices = []
        for outputs, inputs in function(*args, **kwargs):
            given = own_placements(tuple(inputs))
            if len(given) == len(flat):
                given = tuple(p for p, value in zip(given, flat, strict=True) if isinstance(value, TensorSpec))
            made = own_placements(tuple(outputs))
            listed = (*made, *given)
            if (len(given), len(made)) != (len(specs), len(results)) or not all(
                isinstance(p, Placement) for p in listed
            ):
                raise ValueError(
                    f"the sharding registered for {name_of(op)} lists {list(outputs)} for {len(results)} result(s) "
                    f"and {list(inputs)} for {len(flat)} argument(s): list one placement for each result and each "
                    "tensor argument, and None for each other argument"
                )
            choices.append((given, made))
        return OpSharding(
            operands=tuple((None,) * spec.ndim for spec in specs),
            results=tuple((None,) * len(shape) for shape in results),
            result_shapes=results,
            choices=tuple(choices),
        )

    return rule


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec):
            yield from _flat(value)
        else:
            yield value


def _result_shapes(op: Any, template: tuple, specs: Sequence[TensorSpec], platform: Platform) -> Any:
    """Return the global shapes of the results, by running the operation on meta tensors. Return None if the framework
    cannot."""
    stand_ins = [platform.meta_tensor(spec.shape, spec.dtype) for spec in specs]
    if any(x is None for x in stand_ins):
        return None
    args, kwargs = filled(template, stand_ins)
    try:
        with platform.no_dispatch(), platform.no_grad():
            result = op(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(tuple(platform.shape_of(x)) for x in results)
