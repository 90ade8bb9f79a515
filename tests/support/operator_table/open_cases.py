"""Operators that are known to be wrong or to hang, with the reason: to be empty."""

from __future__ import annotations

__all__ = ["OPEN"]

_WRITES_A_COPY = "inplace=True of a partial sum writes into the reduced copy, and the argument stays as it was"
_OWN_GRADIENT = "MindSpore's own gradient without dim differs from call to call"

#: backend -> operator -> why.
OPEN: dict[str, dict[str, str]] = {
    "torch-cpu": {
        "nn.functional.celu": _WRITES_A_COPY,
        "nn.functional.elu": _WRITES_A_COPY,
        "nn.functional.leaky_relu": _WRITES_A_COPY,
        "nn.functional.threshold": _WRITES_A_COPY,
        "nn.functional.rrelu": "inplace=True runs on gathered operands, and the argument stays as it was",
        "to_sparse": "the result is sparse, and full_tensor() of it fails in torch",
    },
    "mindspore": {
        "ops.fftshift": _OWN_GRADIENT,
        "ops.ifftshift": "not looked into; fftshift's own gradient in MindSpore differs from call to call",
        "ops.hfft2": "MindSpore's own result differs from call to call",
        "ops.logit": "one device gave NaN for a gradient where the ranks gave a number; alone it was not seen again",
        "ops.mirror_pad": "MindSpore takes paddings that are computed for another number of operands",
    },
}
