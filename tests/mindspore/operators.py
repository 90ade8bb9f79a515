"""The operators of MindSpore: the public functions of `mint`, `mint.nn.functional` and `ops`, with samples of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.basics.dtypes import FLOATS
from tests.mindspore.operator_samples import SAMPLES, Draw
from tests.support.operator_table.side import Call

TITLE = "the public functions of `mint`, `mint.nn.functional` and `ops`, with samples of our own"

_MODULES = {
    "mint": mint,
    "mint.linalg": mint.linalg,
    "mint.special": mint.special,
    "mint.nn.functional": mint.nn.functional,
    "ops": ops,
}
#: Results of these are not initialised.
_EMPTY = {"mint.empty_like"}
#: Random numbers that no seed of the program controls (see docs/mindspore.md): the ranks must agree.
_RANDOM = {"ops.dropout1d", "ops.dropout2d", "ops.dropout3d", "ops.random_categorical"}
#: Results that differ from call to call on one device, see `tests.mindspore.unsteady`: "forward" the result, "backward"
#: the gradient. Logit's ends the process after a few calls; mirror_pad's is an error where the paddings were a constant
#: in the call before. The mean of binary cross entropy with logits has the gradient of a mean over as many elements as
#: a larger operand had in an earlier call.
UNSTEADY = {
    **dict.fromkeys(("ops.hfft", "ops.hfft2", "ops.hfftn", "ops.ihfft", "ops.ihfft2", "ops.ihfftn"), "forward"),
    **dict.fromkeys(("ops.fftshift", "ops.ifftshift", "ops.logit", "ops.mirror_pad"), "backward"),
    "mint.nn.functional.binary_cross_entropy_with_logits": "backward",
    "ops.binary_cross_entropy_with_logits": "backward",
}
#: With a transposed cotangent MindSpore 2.10 gives the gradient of its memory in row-major order, on one device.
READS_ROW_MAJOR = {"mint.split"}
#: These write their first argument, though their names do not say so.
_WRITE = {"ops.assign", "ops.assign_add", "ops.assign_sub"}
#: Functions of functions, of sparse tensors and of rows of tables; factories and collectives, which take no tensor.
_NO_OPERATORS = ("coo_", "csr_", "row_tensor_", "make_", "scalar_", "all_gather", "all_to_all", "_", "dense_to_sparse")
_NO_OPERATOR_NAMES = """
J SliceGetItem derivative get_grad grad jacfwd jacrev jet jvp linearize value_and_grad vjp vmap partial constexpr
coalesce coo2csr csr2coo print_ tensordump move_to reshard tuple_to_array arange bartlett_window blackman_window eps
eye fftfreq full hamming_window hann_window kaiser_window linspace logspace ones zeros rand randint randn randperm
range rfftfreq standard_laplace standard_normal tril_indices triu_indices tensor_slice empty
uniform_candidate_sampler log_uniform_candidate_sampler identity
"""


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    found = {}
    for prefix, module in _MODULES.items():
        public = ops.function.__all__ if module is ops else module.__all__
        for name in sorted(set(public)):
            function = getattr(module, name, None)
            is_operator = callable(function) and not inspect.isclass(function)
            if is_operator and not name.startswith(_NO_OPERATORS) and name not in _NO_OPERATOR_NAMES.split():
                found[f"{prefix}.{name}"] = function
    return found


def names() -> list[str]:
    return list(_functions())


def _compared(name: str) -> str:
    return "shapes" if name in _EMPTY else "ranks" if name in _RANDOM else "values"


def calls(name: str, count: int) -> list[Call]:
    makers = SAMPLES.get(name) or SAMPLES.get(name.rpartition(".")[2])
    if makers is None:
        return []
    module, _, short = name.rpartition(".")
    function = getattr(_MODULES[module], short)  # as patched by now
    in_place = name.endswith("_") or name in _WRITE
    forms = {"in place" if in_place else "forward": function}
    found = []
    for number in range(count):
        args = makers[number % len(makers)](Draw(name, number))
        found.append(Call(args, {}, forms, not in_place, _compared(name), UNSTEADY.get(name, "")))
    return found


def seed() -> None:
    ms.set_seed(1234)
    ms.manual_seed(1234)


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def array(x: Tensor) -> np.ndarray:
    return x.astype(ms.float32).asnumpy() if x.dtype == ms.bfloat16 else x.asnumpy()


def tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return Tensor(np.array(array), like.dtype)


def requires_grad(x: Tensor) -> bool:
    return x.dtype in FLOATS


def differentiate(
    run: Callable[[list[Any]], tuple[list[Any], Any]], tensors: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], list[np.ndarray | None]]:
    outputs: list[Any] = []
    inputs = [Tensor(x.asnumpy(), x.dtype) for x in tensors]
    if not places:
        return run(inputs)[0], []

    class NoLossError(Exception):
        """The loss has nothing to differentiate."""

    def loss(*xs: Any) -> Any:
        outputs[:], value = run(list(xs))
        if value is None:
            raise NoLossError
        return value

    try:
        _, grads = ms.value_and_grad(loss, tuple(places))(*inputs)
    except NoLossError:
        ms.common.api._pynative_executor.clear_res()
        return outputs, []
    except Exception:
        ms.common.api._pynative_executor.clear_res()
        raise
    grads = grads if isinstance(grads, tuple) else (grads,)
    return outputs, [None if g is None else array(g) for g in grads]


def loss(outputs: Sequence[Any], weigh: Callable[[Any], Any], way: str) -> Any:
    terms = []
    for y in outputs:
        if y.dtype in FLOATS:
            y = y.permute(tuple(reversed(range(y.ndim)))) if way == "transposed" and y.ndim else y
            terms.append(y.sum() if way == "stretched" else (y * weigh(y)).sum())
    return functools.reduce(lambda a, b: a + b, terms) if terms else None


def copied(x: Tensor) -> Tensor:
    """A copy that may be written to."""
    return Tensor(x.asnumpy(), x.dtype)


def weight_like(y: Any) -> Any:
    """A tensor of the dtype of a weight for ``y``."""
    return Tensor(0, ms.float32)


def can_be_partial(x: Tensor) -> bool:
    return x.dtype == ms.float32
