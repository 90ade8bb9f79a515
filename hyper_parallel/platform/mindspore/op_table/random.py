"""Rows of the op table for operations that draw random numbers, and handling of draws without a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.seeds import drop_channels, is_of_one_call, layer_stream, undo_draw
from hyper_parallel.platform.mindspore.op_table.binding import Bound, by_name, row

__all__ = ["DRAWS", "OPS", "RESULTS", "drawn_by_first_rank", "refuse_draw"]


# -------------------------------------------------------------------- dropout
def _bind_primitive(func: Any, args: tuple, kwargs: dict) -> Bound:
    """Bind ``Dropout(x, keep_prob, seed, seed)``.

    A call of `ops.dropout` has already drawn the seeds. `_dropout` calls `ops.dropout` again, so the first draw is
    undone here. The seeds of a layer stay as they are.
    """
    x, keep, *seeds = args
    if is_of_one_call(func.prim):
        given, stream = undo_draw("dropout", (seeds[0], seeds[1])), None
    else:
        given, stream = None, layer_stream(func.prim, x._layout.mesh, x._core.of_first_rank)
    return (x,), (1.0 - float(keep), True, given, stream)


def _dropout(func: Any, xs: tuple, static_args: tuple) -> Any:
    p, training, seed, stream, *_ = static_args
    return ops.dropout(xs[0], p, training, seed) if stream is None else stream(xs[0])


def _of_channels(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the probability of ``Dropout2D`` and ``Dropout3D`` from the primitive."""
    return xs, (1.0 - float(func.prim.keep_prob), *static_args[1:])


def _dropout_of_channels(func: Any, xs: tuple, static_args: tuple) -> Any:
    p, training, *_ = static_args
    return drop_channels(xs[0], p) if training else xs[0]


OPS: dict[str, NativeOp] = by_name(
    {
        "Dropout": row("dropout", _bind_primitive, _dropout, by_function=True),
        "FuncDropoutExt DropoutExt": row("dropout", "x p=0.5 training=True", _dropout),
        "Dropout2D Dropout3D": row(
            "dropout", "x channels:=True", _dropout_of_channels, by_function=True, adjust=_of_channels
        ),
        "Dropout2dExt": row("dropout", "x p=0.5 training=True channels:=True", _dropout_of_channels),
    }
)

RESULTS: dict[str, Callable[[Any], Any]] = dict.fromkeys(
    ("Dropout", "DropoutExt", "Dropout2D", "Dropout3D"), lambda y: (y, None)
)

# -------------------------------------------------------------------- draws without a rule
#: Primitives that draw and have no row. Their seeds are local to this process.
_DRAWS = """
    Bernoulli BernoulliExt Gamma LogUniformCandidateSampler Multinomial MultinomialExt MultinomialWithReplacement
    NormalFloatTensor NormalTensorFloat NormalTensorTensor ParameterizedTruncatedNormal Poisson RandomCategorical
    RandomChoiceWithMask RandomGamma RandomPoisson RandomShuffle UniformCandidateSampler
    InplaceBernoulliScalar InplaceBernoulliTensor InplaceExponential InplaceNormal InplaceRandom InplaceUniform
"""
DRAWS = frozenset(_DRAWS.split())


def refuse_draw(name: str, x: Any) -> None:
    """Raise ValueError for a draw in place."""
    if name.startswith("Inplace"):
        raise ValueError(
            f"{name} draws random numbers into a DTensor, global shape {tuple(x.shape)}, placements "
            f"{list(x._layout.placements)}, and every rank would draw different numbers: make a DTensor with rand or "
            "randn of hyper_parallel, and copy its values with x.copy_()"
        )


def drawn_by_first_rank(result: Any) -> Any:
    """Replace replicated results, which each rank has drawn on its own, by the results of the mesh's first rank."""
    if isinstance(result, (tuple, list)):
        return type(result)([drawn_by_first_rank(y) for y in result])
    if not isinstance(result, Tensor) or getattr(result, "_layout", None) is None:
        return result
    layout = result._layout
    platform = layout.mesh.platform
    with platform.no_dispatch(), platform.no_grad():
        return platform.wrap(result._core.take_part(platform.detach(result), layout), layout)
