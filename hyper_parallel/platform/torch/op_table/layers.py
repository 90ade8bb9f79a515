"""Layers described by their signatures: convolutions, pools, resampling, and others that mix positions of an image.

These layers use the canonical operation ``labelled``. Shapes of results are computed by torch with tensors without
data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract.dispatch import Bound, Given
from hyper_parallel.platform.torch.basics.private import native_functions
from hyper_parallel.platform.torch.op_table.binding import (
    Table,
    UnboundCallError,
    as_called,
    call_placed,
    global_shape,
    hashable,
    rows,
)

__all__ = ["several", "table"]

Shapes: TypeAlias = "tuple[Any, ...]"
#: Function that makes the signature from the shapes of the operands and the other arguments; None for a call without a
#: rule.
Sign = Callable[[Shapes, tuple], "str | None"]
_OWNERS = (torch, F, native_functions)
_BATCH = "abdefklm"


def table() -> Table:
    """Return the op-table rows for layers with a signature."""
    return {**_pools(), **_convolutions(), **_resampling(), **_others()}


# ---------------------------------------------------------------------------------------------------- making rows
def unary(names: str, sign: Callable[[int], str | None], *owners: Any) -> Table:
    """Return an op-table row for functions of one operand, which are called again with their original arguments.

    Args:
        names: names of the functions, separated by spaces.
        sign: makes the signature from the number of dimensions; it has one result. None: there is no rule.
        owners: modules that have the functions.
    """

    def facts(given: Given) -> tuple:
        shape = given.shapes[0]
        signature = None if shape is None else sign(len(shape))
        if signature is None:
            raise UnboundCallError
        shapes = _shapes(call_placed, given.func, given.operands, (given.places, given.rest, given.named))
        return _repeated(signature, len(shapes)), shapes, 0

    return as_called(names, "labelled", "input", facts, *(owners or _OWNERS))


def several(
    names: str, takes: str, sign: Sign, *owners: Any, call: Callable | None = None, groups: int | None = None
) -> Table:
    """Return an op-table row for functions of several operands.

    Args:
        names: names of the functions, separated by spaces.
        takes: their operands and, marked with a plus, their other arguments.
        sign: makes the signature.
        owners: modules that have the functions.
        call: ``call(func, operands, others)`` runs the native call; None: by position, in the order of the text.
        groups: index of the number of groups among the other arguments.
    """
    native = call or (lambda func, operands, others: func(*operands, *others))

    def adjust(func: Any, operands: tuple, static_args: tuple) -> Bound:
        others = hashable(static_args[3:])
        signature = sign(tuple(tuple(global_shape(x)) if isinstance(x, Tensor) else None for x in operands), others)
        if signature is None:
            raise UnboundCallError
        count = 0 if groups is None else others[groups]
        return operands, (signature, _shapes(native, func, operands, others), count, *others)

    def run(func: Any, operands: tuple, static_args: tuple) -> Any:
        count, *others = static_args[2:]
        if groups is not None:
            others[groups] = count
        return native(func, operands, others)

    takes = f"{takes} signature:=None results:=None"
    return rows(names, "labelled", takes, run, *(owners or _OWNERS), adjust=adjust)


def _repeated(signature: str, results: int) -> str:
    """Return the signature with its result listed ``results`` times."""
    dims, bar, terms = signature.partition("|")
    operands, result = dims.split("->")
    return f"{operands}->{','.join([result] * results)}{bar}{terms}"


def _shapes(call: Callable, func: Any, operands: tuple, others: tuple) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the results on one device, from a call on meta tensors. In this call torch raises errors
    about shapes, on all ranks."""
    with no_dispatch():
        results = call(func, tuple(_without_data(x) if isinstance(x, Tensor) else x for x in operands), others)
    return tuple(tuple(y.shape) for y in (results if isinstance(results, (tuple, list)) else (results,)))


def _without_data(x: Tensor) -> Tensor:
    """Return an empty tensor on meta. All floating point tensors get one dtype, because autocast unifies dtypes within
    the native call only."""
    exact = not (x.is_floating_point() or x.is_complex())
    return torch.empty(tuple(global_shape(x)), dtype=x.dtype if exact else torch.float32, device="meta")


# ---------------------------------------------------------------------------------------------------- pools
def _windows(dims: int, ndim: int) -> str | None:
    """Return a signature for an input (samples, channels, ...), or (channels, ...). Its last ``dims`` dimensions are
    unsharded."""
    letters = {dims + 2: "nc", dims + 1: "c"}.get(ndim)
    return letters and f"{letters}{'.' * dims}->{letters}{'.' * dims}"


def _pools() -> Table:
    found: Table = {}
    for k in (1, 2, 3):
        names = "max_pool{0}d max_pool{0}d_with_indices adaptive_max_pool{0}d adaptive_max_pool{0}d_with_indices"
        means = "avg_pool{0}d adaptive_avg_pool{0}d"  # not linear: averages of integers are rounded
        found |= unary(f"{names} {means} lp_pool{{0}}d".format(k), functools.partial(_windows, k))
        found |= several(
            f"max_unpool{k}d",
            "input indices +kernel_size +stride=None +padding=0 +output_size=None",
            functools.partial(_unpooled, k),
            F,
        )
    return found


def _unpooled(dims: int, shapes: Shapes, others: tuple) -> str | None:
    one = _windows(dims, len(shapes[0]))
    return one and f"{one.partition('->')[0]},{one}"


# ---------------------------------------------------------------------------------------------------- convolutions
def _convolutions() -> Table:
    found: Table = {}
    for k in (1, 2, 3):
        found |= several(
            f"conv{k}d",
            "input weight bias=None +stride=1 +padding=0 +dilation=1 +groups=1",
            functools.partial(_convolution, k, "o{i}"),
            groups=3,
        )
        found |= several(
            f"conv_transpose{k}d",
            "input weight bias=None +stride=1 +padding=0 +output_padding=0 +groups=1 +dilation=1",
            functools.partial(_convolution, k, "{i}o"),
            groups=3,
        )
    return found


def _convolution(dims: int, weight: str, shapes: Shapes, others: tuple) -> str | None:
    """Return the signature of a convolution, None for other shapes. A convolution is linear in weight and input, and
    contracts input channels. With groups, input and output channels are sharded together."""
    x, spatial = len(shapes[0]), "." * dims
    if x not in (dims + 1, dims + 2) or len(shapes[1]) != dims + 2:
        return None
    batch = "n" * (x - dims - 1)
    if others[3] > 1:
        return f"{batch}g{spatial},g.{spatial},g->{batch}g{spatial}|01+2"
    return f"{batch}i{spatial},{weight.format(i='i')}{spatial},o->{batch}o{spatial}|01+2"


# ---------------------------------------------------------------------------------------------------- resampling
_UPSAMPLING = """
interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa
"""


def _resampling() -> Table:
    return {
        **unary(_UPSAMPLING, lambda ndim: _windows(ndim - 2, ndim) if ndim > 2 else None),
        # The channels are split, outermost first, into pixels of each position: all dimensions stay in order.
        **unary("pixel_shuffle pixel_unshuffle", lambda ndim: _kept(f"{_BATCH[: ndim - 3]}chw") if ndim > 2 else None),
        **unary("channel_shuffle", lambda ndim: _kept(f"n.{_BATCH[: ndim - 2]}") if ndim > 2 else None),
        **unary("unfold", lambda ndim: {4: "nc..->nc.|0", 3: "c..->c.|0"}.get(ndim), F),
        **unary("fold", lambda ndim: {3: "nc.->nc..|0", 2: "c.->c..|0"}.get(ndim), F),
        **several(
            "grid_sample",
            "input grid +mode='bilinear' +padding_mode='zeros' +align_corners=None",
            lambda shapes, others: _sampled(len(shapes[0]) - 2) if len(shapes[0]) in (4, 5) else None,
            F,
        ),
        **several(
            "affine_grid",
            "theta +size +align_corners=None",
            lambda shapes, others: {4: "n..->n...|0", 5: "n..->n....|0"}.get(len(others[0])),
            F,
            call=lambda func, operands, others: func(*operands, (len(operands[0]), *others[0][1:]), others[1]),
        ),
    }


def _kept(letters: str) -> str:
    """Return a linear signature that preserves the dimensions."""
    return f"{letters}->{letters}|0"


def _sampled(dims: int) -> str:
    spatial = "." * dims
    return f"nc{spatial},n{spatial}.->nc{spatial}"


# ---------------------------------------------------------------------------------------------------- others
def _others() -> Table:
    return {
        # Across the channels, for each position separately.
        **unary("local_response_norm", lambda ndim: _kept(f"n.{_BATCH[: ndim - 2]}")[:-2] if ndim > 2 else None, F),
        **several(
            "group_norm",
            "input +num_groups weight=None bias=None +eps=1e-5 -cudnn_enabled=True",
            _group_norm,
            call=lambda func, operands, others: torch.group_norm(operands[0], others[0], *operands[1:], others[1]),
            groups=0,
        ),
        **several(
            "bilinear",
            "input1 input2 weight bias=None",
            lambda shapes, others: _bilinear(_BATCH[: len(shapes[0]) - 1]),
        ),
        **several(
            "cosine_similarity",
            "x1 x2 +dim=1 +eps=1e-8",
            lambda shapes, others: _across(shapes, others[0]),
        ),
        **several("prelu", "input weight", _prelu, torch, Tensor, F),
        **several("cross", "input other +dim=-1", _crossed, torch.linalg, call=_cross),
        **_statistics("batch_norm"),
        **_statistics("instance_norm"),
        **several(
            "embedding_bag",
            "input weight offsets=None -max_norm=None -norm_type=2 -scale_grad_by_freq=False +mode='mean'"
            " -sparse=False per_sample_weights=None +include_last_offset=False +padding_idx=None",
            lambda shapes, others: "b.,.f,.,b.->bf" if len(shapes[0]) == 2 else ".,.f,.,.->.f",
            F,
            call=_bag,
        ),
        **several(
            "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices",
            "input +kernel_size +output_size=None +output_ratio=None +return_indices=False _random_samples=None",
            _sampled_windows,
            F,
            call=lambda func, xs, others: func(xs[0], *others, xs[1]),
        ),
        **several(
            "multi_margin_loss",
            "input target +p=1 +margin=1.0 weight=None",
            lambda shapes, others: "n.,n,.->n" if len(shapes[0]) == 2 else _whole(shapes, len(shapes[1])),
            F,
            call=lambda func, xs, others: func(*xs[:2], *others, xs[2], reduction="none"),
        ),
        **several(
            "multilabel_margin_loss",
            "input target",
            lambda shapes, others: "n.,n.->n" if len(shapes[0]) == 2 else _whole(shapes, 0),
            F,
            call=lambda func, xs, others: func(*xs, reduction="none"),
        ),
    }


def _prelu(shapes: Shapes, others: tuple) -> str | None:
    """Return the signature of a `prelu`: several weights belong to the channels, one weight to all elements."""
    x, weight = shapes
    if x is None or weight is None or len(x) - 2 > len(_BATCH):
        return None
    letters = f"nc{_BATCH[: max(len(x) - 2, 0)]}"[: len(x)]
    return f"{letters},{'c' if len(x) > 1 and weight not in ((), (1,)) else '.' * len(weight)}->{letters}"


def _group_norm(shapes: Shapes, others: tuple) -> str | None:
    spatial = "." * (len(shapes[0]) - 2)
    return f"ng{spatial},g,g->ng{spatial}" if len(shapes[0]) > 1 else None


def _bilinear(batch: str) -> str:
    return f"{batch}i,{batch}j,oij,o->{batch}o|012+3"


def _across(shapes: Shapes, dim: int) -> str | None:
    """Return a signature for two tensors that broadcast, reduced along ``dim``: broadcast dimensions are unsharded."""
    try:
        common = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None  # torch raises the error
    if not common:
        return _whole(shapes, 0)
    if not -len(common) <= dim < len(common) or len(common) > len(_BATCH):
        return None
    letters = [letter if d != dim % len(common) else "." for d, letter in enumerate(_BATCH[: len(common)])]
    operands = [
        "".join(x if n == m else "." for x, n, m in zip(letters[-len(s) :], s, common[-len(s) :], strict=True))
        for s in shapes
    ]
    return f"{','.join(operands)}->{''.join(x for d, x in enumerate(letters) if d != dim % len(common))}"


def _whole(shapes: Shapes, result: int) -> str:
    """Return a signature without shardable dimensions."""
    return f"{','.join('.' * len((0,) if shape is None else shape) for shape in shapes)}->{'.' * result}"


def _statistics(name: str) -> Table:
    """Return the op-table rows for batch norm or instance norm.

    Both return the running statistics, which the caller writes.
    """
    return several(
        name,
        "input weight bias running_mean running_var +training/use_input_stats +momentum +eps +cudnn_enabled",
        functools.partial(_normalised, name == "instance_norm"),
        torch,
        call=_normalise,
    )


def _normalised(by_instance: bool, shapes: Shapes, others: tuple) -> str | None:
    x, written = len(shapes[0]), others[0] and shapes[3] is not None
    if x - 2 > len(_BATCH) or (shapes[3] is None) != (shapes[4] is None):
        return None
    if x < 2:
        return None if written else _whole((shapes[0], *((0,),) * 4), x)
    if others[0]:
        sizes = ("n" if by_instance and not written else ".") + "c" + "." * (x - 2)
    else:
        sizes = f"nc{_BATCH[: x - 2].replace('n', '')}"
    return f"{sizes},c,c,c,c->{sizes}{',c,c' if written else ''}"


def _normalise(func: Any, operands: tuple, others: tuple) -> Any:
    *tensors, mean, var = operands
    if not others[0] or mean is None:
        return func(*operands, *others)
    mean, var = mean.clone(), var.clone()
    return func(*tensors, mean, var, *others), mean, var


def _bag(func: Any, operands: tuple, others: tuple) -> Any:
    ids, weight, offsets, own_weights = operands
    mode, last, padding = others
    return func(
        ids, weight, offsets, mode=mode, per_sample_weights=own_weights, include_last_offset=last, padding_idx=padding
    )


def _crossed(shapes: Shapes, others: tuple) -> str | None:
    """Return the signature of a cross product. The dimension of the vectors and broadcast dimensions are unsharded."""
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes) or not -ndim <= others[0] < ndim or ndim > len(_BATCH):
        return None
    letters = ["." if d == others[0] % ndim else letter for d, letter in enumerate(_BATCH[:ndim])]
    common = [max(sizes) for sizes in zip(*shapes, strict=True)]
    own = ("".join(x if n == m else "." for x, n, m in zip(letters, s, common, strict=True)) for s in shapes)
    return f"{','.join(own)}->{''.join(letters)}|01"


def _cross(func: Any, operands: tuple, others: tuple) -> Any:
    return torch.linalg.cross(*operands, dim=others[0])


def _sampled_windows(shapes: Shapes, others: tuple) -> str | None:
    if shapes[1] is None:
        return None
    dims = shapes[1][-1]
    letters = {dims + 2: "nc", dims + 1: "c"}.get(len(shapes[0]))
    return letters and f"{letters}{'.' * dims},{letters:.>2}.->{letters}{'.' * dims},{letters}{'.' * dims}"
