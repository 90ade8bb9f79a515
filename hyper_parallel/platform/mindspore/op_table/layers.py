"""Layers described by their signatures: convolutions, pools, resampling, and others that mix positions of an image.

These layers use the canonical operation ``labelled``. Shapes of results come from a call on small tensors, in which
batches and channels have size 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.as_called import Given, Native, as_called, call_native, shapes_of
from hyper_parallel.platform.mindspore.op_table.binding import by_name

__all__ = ["GIVEN_STATISTICS", "OPS", "labelled"]

#: Function that makes the signature of a call, None for a call without a rule.
Sign = Callable[[Given], "str | None"]
_BATCH = "abdefklm"
_GROUPED = "g"
#: Labels of dimensions that a small tensor has in full size.
_KEPT = (".", _GROUPED)


# -------------------------------------------------------------------- making rows
def labelled(
    text: str,
    sign: Sign | str,
    native: Native | None = None,
    groups: Callable[[Given], int] | None = None,
    shapes: Callable[[Given], tuple] | None = None,
    fresh: bool = False,
) -> NativeOp:
    """Return an op-table row for the operation ``labelled``.

    Args:
        text: arguments and operands, see `as_called`.
        sign: the signature, or a function that makes it. One result in it represents several with the same labels.
        native: runs the call; the static arguments begin with the signature, shapes of results and the number of groups
            on this rank.
        groups: returns the number of groups of channels; 1 by default.
        shapes: returns the shapes of the results, if a call on small tensors does not determine them.
        fresh: whether MindSpore makes a new primitive for each call, so that caching calls is useless.
    """
    call = native or call_native

    def facts(given: Given) -> tuple:
        signature = sign if isinstance(sign, str) else sign(given)
        count = 1 if groups is None else groups(given)
        if signature is None or not _fits(signature, given.shapes):
            return _NO_RULE
        found = shapes(given) if shapes is not None else _shapes(given, signature, call, count)
        if found is None:
            return _NO_RULE
        more = (_FORGOTTEN,) if fresh else ()
        return _repeated(signature, len(found)), found, count if _GROUPED in signature else 0, *more

    def no_rule(given: Given) -> tuple:
        found = facts(given)
        return _of_none(given.shapes) if found is _NO_RULE else found

    return as_called("labelled", text, no_rule, call)


_NO_RULE: Any = ()
#: A static argument that is no value: core does not cache calls that have it.
_FORGOTTEN: Any = ...


def _of_none(shapes: tuple) -> tuple:
    """Return a signature that no rule supports: it has one dimension more than each operand. Also return the shapes of
    the results."""
    return f"{','.join('.' * len((*(shape or ()), 0)) for shape in shapes)}->.", ((),), 0


def _fits(signature: str, shapes: tuple) -> bool:
    operands = signature.partition("->")[0].split(",")
    return all(shape is None or len(shape) == len(one) for shape, one in zip(shapes, operands, strict=True))


def _repeated(signature: str, results: int) -> str:
    """Return the signature with its result listed ``results`` times."""
    dims, bar, terms = signature.partition("|")
    operands, result = dims.split("->")
    return signature if "," in result else f"{operands}->{','.join([result] * results)}{bar}{terms}"


def _shapes(given: Given, signature: str, native: Native, groups: int) -> Any:
    operands, results = (side.split(",") for side in signature.partition("|")[0].split("->"))
    sizes: dict[str, int] = {}
    small: list[Any] = []
    for labels, shape in zip(operands, given.shapes, strict=True):
        if shape is not None:
            sizes.update({label: n for label, n in zip(labels, shape, strict=True) if label != "."})
            shape = tuple(n if label in _KEPT else 1 for label, n in zip(labels, shape, strict=True))
        small.append(shape)
    found = shapes_of(given, tuple(small), native, (signature, (), groups))
    if found is None:
        return None
    results = results * len(found) if len(results) == 1 else results
    return tuple(
        tuple(n if label == "." else sizes[label] for label, n in zip(labels, shape, strict=True))
        for labels, shape in zip(results, found, strict=True)
    )


def _ndim(given: Given) -> int:
    return len(given.shapes[0])


# -------------------------------------------------------------------- convolutions
@functools.lru_cache(1 << 10)
def _conv2d(
    out_channel: int, kernel: tuple, pad_mode: str, pad: tuple, stride: tuple, dilation: tuple, group: int
) -> Any:
    return ops.Conv2D(out_channel, kernel, 1, pad_mode, pad, stride, dilation, group)


@functools.lru_cache(1 << 10)
def _conv3d(
    out_channel: int, kernel: tuple, pad_mode: str, pad: tuple, stride: tuple, dilation: tuple, group: int
) -> Any:
    return ops.Conv3D(out_channel, kernel, 1, pad_mode, pad, stride[-3:], dilation[-3:], group)


@functools.lru_cache(1 << 10)
def _conv_transpose(out_channel: int, kernel: tuple, pad_mode: str, pad: tuple, stride: tuple, dilation: tuple) -> Any:
    return ops.operations.nn_ops.Conv2DBackpropInput(out_channel, kernel, pad_mode, pad, None, 1, stride, dilation)


@functools.lru_cache(1 << 10)
def _conv_transpose3d(
    in_channel: int, out_channel: int, kernel: tuple, mode: str, pad: tuple, stride: tuple, dilation: tuple, more: tuple
) -> Any:
    return ops.Conv3DTranspose(in_channel, out_channel, kernel, 1, mode, pad, stride, dilation, 1, more)


def _convolve(make: Callable) -> Native:
    """Return a function that calls the primitive with this rank's number of channels."""

    def native(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
        p, weight = func.prim, args[1]
        groups = static_args[2] or 1
        return make(weight.shape[0], p.kernel_size, p.pad_mode, p.padding, p.stride, p.dilation, groups)(*args)

    return native


def _convolution(dims: int) -> Sign:
    """Return the signature of a convolution: linear in weight and input, whose channels are contracted. With groups,
    input and output channels are sharded together."""
    spatial = "." * dims

    def sign(given: Given) -> str:
        if given.func.prim.group > 1:
            return f"ng{spatial},g.{spatial}->ng{spatial}|01"
        return f"ni{spatial},oi{spatial}->no{spatial}|01"

    return sign


def _conv_rows(make: Callable, dims: int) -> NativeOp:
    return labelled("x weight", _convolution(dims), _convolve(make), groups=lambda given: given.func.prim.group)


def _transposed(dims: int) -> Sign:
    spatial = "." * dims

    def sign(given: Given) -> str | None:
        prim = given.func.prim
        return f"ni{spatial},io{spatial}->no{spatial}|01" if prim.group == 1 else None

    return sign


def _call_transposed(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call a transposed convolution, whose primitive is the gradient of a convolution.

    The call also has the global sizes of its result, of which this rank computes a shard. The primitive has as many
    channels as x: the output channels of the convolution.
    """
    p, (x, weight, sizes) = func.prim, args
    prim = _conv_transpose(weight.shape[0], p.kernel_size, p.pad_mode.lower(), p.padding, p.stride, p.dilation)
    return prim(x, weight, (x.shape[0], weight.shape[1], *sizes[2:]))


def _call_transposed3d(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    p, (x, weight) = func.prim, args
    sizes = (tuple(getattr(p, name)[-3:]) for name in ("stride", "dilation", "output_padding"))
    return _conv_transpose3d(*weight.shape[:2], p.kernel_size, p.pad_mode, p.pad_list, *sizes)(x, weight)


# -------------------------------------------------------------------- pools
@functools.lru_cache(1 << 10)
def _unpool(ksize: tuple, strides: tuple, pads: tuple, output_shape: tuple) -> Any:
    return ops.operations.nn_ops.MaxUnpool2D(ksize, strides, pads, output_shape)


def _call_unpool(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call the unpooling with the local shape of its result, an attribute of the primitive."""
    attributes = func.prim.attrs
    if not attributes["output_shape"]:
        return func(*args)
    of_window = (attributes[name][2:] for name in ("ksize", "strides", "pads"))
    return _unpool(*of_window, (*args[0].shape[:2], *attributes["output_shape"][2:]))(*args)


def _statistics(given: Given) -> str | None:
    spatial = _BATCH[: _ndim(given) - 2]
    return f"nc{spatial},c,c,c,c->nc{spatial}" if _ndim(given) > 1 else None


def _normalised(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    return func(*args, **kwargs)[0]


#: First result of BatchNorm with given statistics; `composed` makes the others.
GIVEN_STATISTICS = labelled("x weight bias mean variance", _statistics, _normalised)


# -------------------------------------------------------------------- others
def _crossed(given: Given) -> str | None:
    """Return the signature of a cross product. The dimension of the vectors, by default the first of size 3, and
    broadcast dimensions are unsharded."""
    shapes = given.shapes
    ndim = max(map(len, shapes))
    common = [max(((1,) * (ndim - len(s)) + s)[d] for s in shapes) for d in range(ndim)]
    dim = given.values.get("dim")
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        dim = next((d for d, n in enumerate(common) if n == 3), None)
    if dim is None or ndim > len(_BATCH):
        return None
    letters = [letter if d != dim % ndim else "." for d, letter in enumerate(_BATCH[:ndim])]
    operands = [
        "".join(x if n == m else "." for x, n, m in zip(letters[-len(s) :], s, common[-len(s) :], strict=True))
        for s in shapes
    ]
    return f"{','.join(operands)}->{''.join(letters)}|01"


def _cross(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call the cross product with its dimension, since shards may have another dimension of size 3."""
    labels = static_args[0].partition("->")[2]
    return func(args[0], args[1], labels.index(".") - labels.index("|"))


def _kept_but(which: Callable[[Given], tuple[int, ...]], terms: str = "") -> Sign:
    """Return a signature of one operand that is unsharded along the given dimensions."""

    def sign(given: Given) -> str:
        ndim = _ndim(given)
        whole = {d % ndim for d in which(given)}
        labels = "".join("." if d in whole else letter for d, letter in zip(range(ndim), _BATCH, strict=False))
        return f"{labels}->{labels}{terms}"

    return sign


def _not_of_renorm(given: Given) -> tuple[int, ...]:
    """Return all dimensions except the dimension along which the slices are taken."""
    ndim = _ndim(given)
    return tuple(d for d in range(ndim) if d != given.func.prim.dim % ndim)


def _reversed(given: Given) -> str:
    prim, ndim = given.func.prim, _ndim(given)
    labels = [*_BATCH[:ndim]]
    labels[prim.seq_dim] = "."
    return f"{''.join(labels)},{labels[prim.batch_dim]}->{''.join(labels)}|0"


def _size_of_batch(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call ``AffineGrid`` with this rank's size of the batch."""
    theta, size, *rest = args
    return func(theta, (theta.shape[0], *size[1:]), *rest, **kwargs)


def _group_norm(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    return func(args[0], static_args[2], *args[2:], **kwargs)


def _states(given: Given) -> tuple:
    """Return the shapes of the results of an LSTM layer that the rule uses: the outputs of each step, and the last
    states."""
    x, h, c, _ = given.shapes
    return (*x[:2], h[0] * h[2]), h, c


def _prelu(given: Given) -> str | None:
    ndim, channels = _ndim(given), "." if given.shapes[1] == (1,) else "c"
    return f"n{channels}{_BATCH[: ndim - 2]},{channels}->n{channels}{_BATCH[: ndim - 2]}" if ndim > 1 else None


_WINDOWS2, _WINDOWS3 = "nc..->nc..", "nc...->nc..."

OPS: dict[str, NativeOp] = by_name(
    {
        "Conv2D": _conv_rows(_conv2d, 2),
        "Conv3D": _conv_rows(_conv3d, 3),
        "Conv2DBackpropInput Conv2DTranspose": labelled("x weight -sizes", _transposed(2), _call_transposed),
        "Conv3DTranspose": labelled("x weight", _transposed(3), _call_transposed3d),
        "AvgPool MaxPool MaxPoolWithArgmaxV2 AdaptiveAvgPool2D AdaptiveMaxPool2D Im2Col": labelled("x", _WINDOWS2),
        "AvgPool3D MaxPool3D MaxPool3DWithArgmax AdaptiveAvgPool3D": labelled("x", _WINDOWS3),
        "AdaptiveMaxPool3D": labelled("x -sizes", _WINDOWS3),
        "FractionalMaxPoolWithFixedKsize": labelled("x samples", "nc..,nc.->nc.."),
        "MaxUnpool2D": labelled("x indices", "nc..,nc..->nc..", _call_unpool, fresh=True),
        "UpsampleNearest1D UpsampleLinear1D ResizeLinear1D": labelled("x -size", "nc.->nc."),
        "UpsampleNearest2D UpsampleBilinear2D UpsampleBicubic2D ResizeNearestNeighborV2 ResizeBilinearV2 ResizeBicubic"
        " ResizeNearestNeighbor Col2Im": labelled("x -size", _WINDOWS2),
        "UpsampleNearest3D UpsampleTrilinear3D": labelled("x -size", _WINDOWS3),
        "GridSampler2D": labelled("x grid", "nc..,n...->nc.."),
        "GridSampler3D": labelled("x grid", "nc...,n....->nc..."),
        "AffineGrid": labelled(
            "theta -size",
            lambda given: {4: "n..->n...|0", 5: "n..->n....|0"}.get(len(given.values["size"])),
            _size_of_batch,
        ),
        "CropAndResize": labelled("x boxes places -size", "...c,b.,b->b..c"),
        "SpaceToBatchND BatchToSpaceND": labelled("x", ".c..->.c..|0"),
        "ChannelShuffle": labelled("x", lambda given: _kept_but(lambda _: (1,), "|0")(given)),
        "LRN": labelled("x", _kept_but(lambda _: (1,)), fresh=True),
        "GroupNorm": labelled(
            "x -groups weight bias -eps",
            lambda given: "ng{0},g,g->ng{0},ng,ng".format("." * (_ndim(given) - 2)),
            _group_norm,
            groups=lambda given: given.values["groups"],
        ),
        "PReLU": labelled("x weight", _prelu),
        "Cross LinalgCross": labelled("x other -dim", _crossed, _cross),
        "Renorm": labelled("x", _kept_but(_not_of_renorm)),
        "Padding": labelled("x", _kept_but(lambda _: (-1,), "|0")),
        "ReverseSequence": labelled("x lengths", _reversed),
        "IOU": labelled("x other", "n.,m.->mn"),
        "BoundingBoxEncode BoundingBoxDecode": labelled("x other", "n.,n.->n."),
        "CheckValid": labelled("x sizes", "n.,.->n"),
        "InTopK": labelled("x targets -k", "n.,n->n"),
        "LSTM": labelled("x h c weights", ".n.,.n.,.n.,...->.n.,.n.,.n.", shapes=_states),
        "Ger Outer": labelled("x other", "i,j->ij|01"),
        "CTCLossV2": labelled("x targets lengths lengths_of_targets", ".n.,n.,n,n->n,n.."),
    }
)
