"""Parameters whose data are consecutive in one storage: see `Fast.move_to_one_storage`.

A flat tensor remembers the addresses of its parameters, and which parameters need a further check. Where two dimensions
of a shape are equal, a parameter could be transposed in place and keep its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hyper_parallel.platform.torch.gradients.autograd import address_of, as_plain

__all__ = ["find_flat", "move_to_flat"]


def move_to_flat(xs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Move the data of parameters into one new 1-D tensor; see `Fast.move_to_one_storage`."""
    if any(x.is_meta or x.is_pinned() or not x.is_contiguous() for x in xs):
        return None
    locals_ = [as_plain(x.detach()) for x in xs]
    flat = locals_[0].new_zeros(sum(lengths))
    for x, local, part in zip(xs, locals_, flat.split_with_sizes(list(lengths)), strict=True):
        place = part.narrow(0, 0, local.numel()).view(local.shape)
        place.copy_(local)
        x.data = place
    return _remembering(flat, xs)


def find_flat(xs: Sequence[Tensor], lengths: Sequence[int], flat: Tensor | None) -> Tensor | None:
    """Return the 1-D tensor that holds the data of the parameters; see `Fast.in_one_storage`."""
    known: Any = flat
    if known is not None and list(map(address_of, xs)) == known.addresses:
        if not known.asked or all(xs[i].is_contiguous() for i in known.asked):
            return flat
        return None
    locals_ = [as_plain(x.detach()) for x in xs]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    first = next((i for i, x in enumerate(locals_) if x.numel()), None)
    if first is None or any(x.is_meta or x.is_pinned() for x in locals_):
        return None
    storage, begin = locals_[first].untyped_storage(), locals_[first].storage_offset() - starts[first]
    width = locals_[first].itemsize
    if begin < 0 or (begin + sum(lengths)) * width > storage.nbytes():
        return None
    for x, start in zip(locals_, starts, strict=True):
        if not x.numel():
            continue
        there = x.storage_offset() - begin == start and x.untyped_storage().data_ptr() == storage.data_ptr()
        if not there or not x.is_contiguous():
            return None
    return _remembering(locals_[first].as_strided((sum(lengths),), (1,), begin), xs)


def _remembering(flat: Any, xs: Sequence[Tensor]) -> Any:
    flat.addresses = list(map(address_of, xs))
    shapes = [tuple(as_plain(x.detach()).shape) for x in xs]
    flat.asked = [i for i, shape in enumerate(shapes) if len({n for n in shape if n > 1}) < sum(n > 1 for n in shape)]
    return flat
