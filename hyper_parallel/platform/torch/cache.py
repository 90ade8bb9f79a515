"""What is kept on a tensor for as long as it is valid: how it is stored, and by what its data is known again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["NOTHING", "SAME_AS_VIEW", "Cache", "address_of", "shape_of", "stride_of"]

# Not as methods of DTensors, which first ask whether they are to be intercepted.
shape_of, stride_of, address_of = torch.Tensor.shape.__get__, torch.Tensor.stride, torch.Tensor.data_ptr

#: What is compared where something was kept for a tensor, besides the version, which ``x.data = y`` leaves as it is:
#: that the view that was kept has the same data; nothing, for DTensors, which forget what was kept; else address, shape
#: and strides.
SAME_AS_VIEW, NOTHING = None, ()


class Cache(dict):
    """``key -> (value or weak reference, version of the holder, what of its data is compared)``, kept in the attribute
    ``_cached`` of the holder. All values share the memory of the holder, so while one lives no other data can have its
    address.

    It belongs to that one tensor object: a copy of the tensor, or one that was saved and loaded, starts empty.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict) -> Cache:
        return Cache()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # A class that torch.load(weights_only=True) accepts.
        return (OrderedDict, ())
