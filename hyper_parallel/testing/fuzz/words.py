"""Operations of random programs, each as a call of an adapter and in NumPy.

Such an operation is called a word. A word chooses its arguments for the arrays that a program has at that point. So
every program is valid on a single device. The NumPy version gives shapes. Where a framework cannot write through a
view, the NumPy version also gives values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["WORDS", "Word", "apply", "has_step"]

Arrays = list[np.ndarray]
#: Most elements of an intermediate result.
MOST = 512


@dataclass(frozen=True)
class Word:
    """An operation.

    Attributes:
        name: name in programs.
        count: number of tensors that it takes.
        choose: ``choose(rng, *arrays)`` returns the other arguments, or None for tensors that do not fit.
        adapter: ``adapter(adapter, tensors, args)`` runs it on tensors of the framework. It returns a sequence for
            several results.
        numpy: ``numpy(arrays, args)`` runs it in NumPy.
        writes: whether it writes to its first tensor, which is the result.
        weight: relative frequency in programs.
    """

    name: str
    count: int
    choose: Callable[..., tuple | None]
    adapter: Callable[[Any, list, tuple], Any]
    numpy: Callable[[Arrays, tuple], Any]
    writes: bool = False
    weight: float = 1.0


WORDS: dict[str, Word] = {}


def _add(name: str, count: int, choose: Any, adapter: Any, numpy: Any, **options: Any) -> None:
    WORDS[name] = Word(name, count, choose, adapter, numpy, **options)


def apply(word: str, arrays: Arrays, args: tuple, row_major: bool = False) -> list[np.ndarray]:
    """Return the results of a word in NumPy, as a list. With ``row_major``, new arrays are in row-major order, unlike
    NumPy's."""
    with np.errstate(all="ignore"):
        result = WORDS[word].numpy(arrays, args)
        results = result if isinstance(result, (tuple, list)) else [np.asanyarray(result)]
        # Before NumPy 2, a 0-D float32 array and a Python number make a float64.
        dtype = next((x.dtype for x in arrays if _floating(x)), np.dtype(np.float64))
        results = [y.astype(dtype, copy=False) if _floating(y) else y for y in results]
        return [_in_row_major_order(y, arrays) for y in results] if row_major else results


def _in_row_major_order(y: np.ndarray, arrays: Arrays) -> np.ndarray:
    """Return ``y``, or a copy in row-major order if it is a new array in another order."""
    is_view = any(np.may_share_memory(y, x) for x in arrays)
    return y if is_view else np.ascontiguousarray(y).reshape(y.shape)


def _floating(x: np.ndarray) -> bool:
    return np.issubdtype(x.dtype, np.floating)


def _index(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    """Return an encoded index of ints, slices, None and an ellipsis: a tuple stands for a slice."""
    items: list[Any] = []
    for size in x.shape[: int(rng.integers(0, x.ndim + 1))]:
        kind = rng.integers(0, 4)
        if kind == 0 and size:
            items.append(int(rng.integers(-size, size)))
        elif kind == 1:
            start = int(rng.integers(0, size + 1))
            items.append((start, int(rng.integers(start, size + 1)), None))
        elif kind == 2 and size > 1:
            items.append((int(rng.integers(0, 2)), None, 2))
        else:
            items.append((None, None, None))
    if rng.random() < 0.2:
        items.append(...)
    if rng.random() < 0.1:
        items.insert(int(rng.integers(0, len(items) + 1)), None)
    return (tuple(items),) if items else None


def _decode(index: tuple) -> tuple:
    return tuple(slice(*item) if isinstance(item, tuple) else item for item in index)


def has_step(index: tuple) -> bool:
    """Return whether an encoded index has a slice with a step."""
    return any(isinstance(item, tuple) and item[2] is not None for item in index)


def _indexed(x: np.ndarray, index: tuple) -> np.ndarray:
    # An ellipsis makes single elements views too.
    return x[_decode(index if Ellipsis in index else (*index, ...))]


def _always(rng: np.random.Generator, *arrays: np.ndarray) -> tuple:
    return ()


def _of_floats(rng: np.random.Generator, *arrays: np.ndarray) -> tuple | None:
    return () if all(map(_floating, arrays)) else None


def _alike(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> tuple | None:
    """Accept two tensors of one dtype that can be broadcast."""
    if x.dtype != y.dtype or x.dtype == bool:
        return None
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return None
    return () if np.prod(shape) <= MOST else None


def _rounded(x: np.ndarray) -> float:
    """Return the error that rounding may cause in numbers around 1."""
    return 0.05 if x.dtype == np.float16 else 1e-3


def _off_zero(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    """Accept floats so far from zero that rounding cannot change a sign."""
    return () if _floating(x) and not (np.abs(x) <= _rounded(x)).any() else None


def _clear_extreme(sign: int) -> Callable[..., tuple | None]:
    """Return a function that chooses a dimension along which rounding cannot change the largest element.

    With ``sign`` -1, it looks at the smallest element.
    """

    def choose(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
        args = _full_dim(rng, x)
        if args is None or x.shape[args[0]] < 2 or not x.size:
            return args
        first, second = np.moveaxis(np.sort(sign * x, axis=args[0]), args[0], 0)[[-1, -2]]
        return None if (first - second <= _rounded(x) * np.maximum(1, np.abs(first))).any() else args

    return choose


def _told_apart(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> tuple | None:
    """Accept two tensors that broadcast, for which rounding cannot change the elementwise maximum."""
    if _alike(rng, x, y) is None:
        return None
    close = np.abs(x - y) <= _rounded(x) * np.maximum(1, np.abs(x)) if _floating(x) else np.zeros(1, bool)
    return None if close.any() else ()


def _dim(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return (int(rng.integers(-x.ndim, x.ndim)),) if x.ndim and _floating(x) else None


def _full_dim(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    found = _dim(rng, x)
    return found if found and x.shape[found[0]] else None


def _reduced(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    if not _floating(x):
        return None
    if not x.ndim or rng.random() < 0.3:
        return (None, False)
    return (int(rng.integers(-x.ndim, x.ndim)), bool(rng.integers(0, 2)))


def _mean_reduced(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return _reduced(rng, x) if x.size else None


def _softmax(x: np.ndarray, dim: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=dim, keepdims=True)) if x.size else x
    return e / e.sum(axis=dim, keepdims=True)


def _log_softmax(x: np.ndarray, dim: int) -> np.ndarray:
    """Return the logarithm of a softmax, without computing the softmax, which soon is zero in float16."""
    y = x - x.max(axis=dim, keepdims=True) if x.size else x
    return y - np.log(np.exp(y).sum(axis=dim, keepdims=True))


# ---------------------------------------------------------------------------- element by element
for _name, _adapter, _numpy in [
    ("tanh", lambda adapter, xs, a: adapter.tanh(xs[0]), lambda xs, a: np.tanh(xs[0])),
    ("sigmoid", lambda adapter, xs, a: adapter.sigmoid(xs[0]), lambda xs, a: 1 / (1 + np.exp(-xs[0]))),
    ("silu", lambda adapter, xs, a: adapter.silu(xs[0]), lambda xs, a: xs[0] / (1 + np.exp(-xs[0]))),
    ("square", lambda adapter, xs, a: adapter.square(xs[0]), lambda xs, a: xs[0] ** 2),
]:
    _add(_name, 1, _of_floats, _adapter, _numpy, weight=0.5)
_add("relu", 1, _off_zero, lambda adapter, xs, a: adapter.relu(xs[0]), lambda xs, a: np.maximum(xs[0], 0), weight=0.5)
_add("neg", 1, lambda rng, x: None if x.dtype == bool else (), lambda adapter, xs, a: -xs[0], lambda xs, a: -xs[0])


def _scalar(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return (float(rng.choice([-1.5, 0.5, 2.0])),) if _floating(x) else None


_add("scaled", 1, _scalar, lambda adapter, xs, a: xs[0] * a[0], lambda xs, a: xs[0] * xs[0].dtype.type(a[0]))
_add("shifted", 1, _scalar, lambda adapter, xs, a: xs[0] + a[0], lambda xs, a: xs[0] + xs[0].dtype.type(a[0]))
_add("add", 2, _alike, lambda adapter, xs, a: xs[0] + xs[1], lambda xs, a: xs[0] + xs[1], weight=2)
_add("sub", 2, _alike, lambda adapter, xs, a: xs[0] - xs[1], lambda xs, a: xs[0] - xs[1])
_add("mul", 2, _alike, lambda adapter, xs, a: xs[0] * xs[1], lambda xs, a: xs[0] * xs[1], weight=2)
_add(
    "div",
    2,
    lambda rng, x, y: _alike(rng, x, y) if _floating(x) else None,
    lambda adapter, xs, a: xs[0] / (2.0 + xs[1] * xs[1]),
    lambda xs, a: xs[0] / (2 + xs[1] * xs[1]),
)
_add("greater", 2, _told_apart, lambda adapter, xs, a: xs[0] > xs[1], lambda xs, a: xs[0] > xs[1])
_add(
    "where",
    2,
    lambda rng, x, y: _alike(rng, x, y) if _floating(x) else None,
    lambda adapter, xs, a: adapter.where(xs[0] > xs[1], *xs),
    lambda xs, a: np.where(xs[0] > xs[1], *xs),
)


# ---------------------------------------------------------------------------- products
def _product(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> tuple | None:
    fits = x.ndim >= 2 and y.ndim == 2 and _floating(x) and x.dtype == y.dtype and x.shape[-1] == y.shape[0]
    return () if fits and x.size * y.shape[1] <= 8 * MOST else None


_add("matmul", 2, _product, lambda adapter, xs, a: adapter.matmul(*xs), lambda xs, a: np.matmul(*xs), weight=4)
_add(
    "linear",
    2,
    lambda rng, x, w: _product(rng, x, w.T) if w.ndim == 2 else None,
    lambda adapter, xs, a: adapter.linear(*xs),
    lambda xs, a: np.matmul(xs[0], xs[1].T),
    weight=4,
)

# ---------------------------------------------------------------------------- reductions
_add(
    "sum",
    1,
    _reduced,
    lambda adapter, xs, a: adapter.sum(xs[0], *a),
    lambda xs, a: xs[0].sum(axis=a[0], keepdims=a[1]),
)
_add(
    "mean",
    1,
    _mean_reduced,
    lambda adapter, xs, a: adapter.mean(xs[0], *a),
    lambda xs, a: xs[0].mean(axis=a[0], keepdims=a[1]),
)
_add("amax", 1, _clear_extreme(1), lambda adapter, xs, a: adapter.amax(xs[0], *a), lambda xs, a: xs[0].max(axis=a[0]))
_add("amin", 1, _clear_extreme(-1), lambda adapter, xs, a: adapter.amin(xs[0], *a), lambda xs, a: xs[0].min(axis=a[0]))
_add("softmax", 1, _full_dim, lambda adapter, xs, a: adapter.softmax(xs[0], *a), lambda xs, a: _softmax(xs[0], *a))
_add(
    "log_softmax",
    1,
    _full_dim,
    lambda adapter, xs, a: adapter.log_softmax(xs[0], *a),
    lambda xs, a: _log_softmax(xs[0], *a),
)


# ---------------------------------------------------------------------------- views
def _shape(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    """Return a shape with two dimensions merged, or one dimension split."""
    shape = list(x.shape)
    if x.ndim > 1 and rng.random() < 0.6:
        i = int(rng.integers(0, x.ndim - 1))
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    elif x.ndim and x.ndim < 4:
        i = int(rng.integers(0, x.ndim))
        factors = [n for n in range(1, shape[i] + 1) if shape[i] % n == 0]
        if factors:
            n = int(rng.choice(factors))
            shape[i : i + 1] = [n, shape[i] // n]
    if shape and 0 not in shape and rng.random() < 0.3:
        shape[int(rng.integers(0, len(shape)))] = -1
    return (tuple(shape),)


def _two_dims(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return tuple(int(d) for d in rng.choice(x.ndim, 2, replace=False)) if x.ndim > 1 else None


def _order(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return (tuple(int(d) for d in rng.permutation(x.ndim)),) if x.ndim > 1 else None


def _expanded(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    shape = tuple(int(rng.integers(1, 4)) if n == 1 else n for n in x.shape)
    shape = (int(rng.integers(1, 4)), *shape) if rng.random() < 0.3 else shape
    return (shape,) if np.prod(shape) <= MOST else None


def _pieces(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return (int(rng.integers(1, 4)), int(rng.integers(0, x.ndim))) if x.ndim and x.size else None


def _split(x: np.ndarray, size: int, dim: int) -> list[np.ndarray]:
    return np.split(x, range(size, x.shape[dim], size), axis=dim)


_add("reshape", 1, _shape, lambda adapter, xs, a: adapter.reshape(xs[0], *a), lambda xs, a: xs[0].reshape(*a), weight=2)
_add(
    "transpose",
    1,
    _two_dims,
    lambda adapter, xs, a: adapter.transpose(xs[0], *a),
    lambda xs, a: xs[0].swapaxes(*a),
    weight=2,
)
_add("permute", 1, _order, lambda adapter, xs, a: adapter.permute(xs[0], *a), lambda xs, a: xs[0].transpose(*a))
_add("index", 1, _index, lambda adapter, xs, a: xs[0][_decode(a[0])], lambda xs, a: _indexed(xs[0], *a), weight=4)
_add(
    "unsqueeze",
    1,
    lambda rng, x: (int(rng.integers(0, x.ndim + 1)),) if x.ndim < 4 else None,
    lambda adapter, xs, a: adapter.unsqueeze(xs[0], *a),
    lambda xs, a: np.expand_dims(xs[0], *a),
)
_add("expand", 1, _expanded, lambda adapter, xs, a: adapter.expand(xs[0], *a), lambda xs, a: np.broadcast_to(xs[0], *a))
_add("split", 1, _pieces, lambda adapter, xs, a: adapter.split(xs[0], *a), lambda xs, a: _split(xs[0], *a))
_add(
    "chunk",
    1,
    _pieces,
    lambda adapter, xs, a: adapter.chunk(xs[0], *a),
    lambda xs, a: _split(xs[0], -(-xs[0].shape[a[1]] // a[0]), a[1]),
)
_add("contiguous", 1, _always, lambda adapter, xs, a: adapter.contiguous(xs[0]), lambda xs, a: _contiguous(xs[0], *a))
_add("detach", 1, _of_floats, lambda adapter, xs, a: adapter.detach(xs[0]), lambda xs, a: xs[0], weight=0.5)


def _contiguous(x: np.ndarray, copies_offsets: bool = False) -> np.ndarray:
    return x.copy() if copies_offsets and _has_offset(x) else np.ascontiguousarray(x).reshape(x.shape)


def _has_offset(x: np.ndarray) -> bool:
    whole = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return x.__array_interface__["data"][0] != whole.__array_interface__["data"][0]


def _joined(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> tuple | None:
    fits = x.ndim and x.dtype == y.dtype and x.ndim == y.ndim and x.size + y.size <= MOST
    if not fits:
        return None
    dim = int(rng.integers(0, x.ndim))
    alike = all(a == b for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if d != dim)
    return (dim,) if alike else None


_add("cat", 2, _joined, lambda adapter, xs, a: adapter.cat(xs, *a), lambda xs, a: np.concatenate(xs, *a), weight=3)
_add(
    "stack",
    2,
    lambda rng, x, y: _joined(rng, x, y) if x.shape == y.shape else None,
    lambda adapter, xs, a: adapter.stack(xs, *a),
    lambda xs, a: np.stack(xs, *a),
    weight=3,
)


# ---------------------------------------------------------------------------- look-ups, modulo the size
def _ids(x: np.ndarray) -> bool:
    return x.dtype == np.int64


def _looked_up(rng: np.random.Generator, ids: np.ndarray, w: np.ndarray) -> tuple | None:
    fits = _ids(ids) and w.ndim == 2 and w.shape[0] and _floating(w)
    return () if fits and ids.size * w.shape[1] <= MOST and ids.ndim < 4 else None


def _selected(rng: np.random.Generator, x: np.ndarray, ids: np.ndarray) -> tuple | None:
    if not (_ids(ids) and ids.ndim == 1 and x.ndim and _floating(x)):
        return None
    dim = int(rng.integers(0, x.ndim))
    return (dim,) if x.shape[dim] and x.size // x.shape[dim] * ids.size <= MOST else None


def _gathered(rng: np.random.Generator, x: np.ndarray, ids: np.ndarray) -> tuple | None:
    if not (_ids(ids) and ids.ndim == x.ndim and x.ndim and _floating(x)):
        return None
    dim = int(rng.integers(0, x.ndim))
    fits = x.shape[dim] and all(ids.shape[d] <= n for d, n in enumerate(x.shape) if d != dim)
    return (dim,) if fits else None


def _gather(x: np.ndarray, ids: np.ndarray, dim: int) -> np.ndarray:
    x = x[tuple(slice(None if d == dim else n) for d, n in enumerate(ids.shape))]
    return np.take_along_axis(x, ids % x.shape[dim], dim)


_add(
    "embedding",
    2,
    _looked_up,
    lambda adapter, xs, a: adapter.embedding(xs[0] % xs[1].shape[0], xs[1]),
    lambda xs, a: xs[1][xs[0] % len(xs[1])],
    weight=8,
)
_add(
    "index_select",
    2,
    _selected,
    lambda adapter, xs, a: adapter.index_select(xs[0], a[0], xs[1] % xs[0].shape[a[0]]),
    lambda xs, a: np.take(xs[0], xs[1] % xs[0].shape[a[0]], a[0]),
    weight=6,
)
_add(
    "gather",
    2,
    _gathered,
    lambda adapter, xs, a: adapter.gather(xs[0], a[0], xs[1] % xs[0].shape[a[0]]),
    lambda xs, a: _gather(*xs, *a),
    weight=6,
)


def _marked(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> tuple | None:
    fits = _floating(x) and _floating(y) and x.shape == y.shape
    return (float(rng.choice([-1.5, 0.0, 2.0])),) if fits else None


_add(
    "masked_fill",
    2,
    _marked,
    lambda adapter, xs, a: adapter.masked_fill(xs[0], xs[1] > 0, *a),
    lambda xs, a: np.where(xs[1] > 0, xs[0].dtype.type(a[0]), xs[0]),
)


# ---------------------------------------------------------------------------- norms and losses
def _normed(rng: np.random.Generator, x: np.ndarray, w: np.ndarray) -> tuple | None:
    fits = x.ndim and w.shape == x.shape[-1:] and x.shape[-1] and x.dtype == w.dtype == np.float32
    return () if fits else None


def _classified(rng: np.random.Generator, x: np.ndarray, ids: np.ndarray) -> tuple | None:
    fits = x.dtype == np.float32 and x.ndim == 2 and _ids(ids) and ids.shape == x.shape[:1] and x.size
    return (str(rng.choice(["mean", "sum", "none"])),) if fits else None


def _layer_norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    away = x - x.mean(-1, keepdims=True)
    return away / np.sqrt((away**2).mean(-1, keepdims=True) + 1e-5) * w + w


def _cross_entropy(x: np.ndarray, ids: np.ndarray, reduction: str) -> np.ndarray:
    losses = -np.log(_softmax(x, 1))[np.arange(len(ids)), ids % x.shape[1]]
    return losses if reduction == "none" else getattr(losses, reduction)()


_add(
    "layer_norm",
    2,
    _normed,
    lambda adapter, xs, a: adapter.layer_norm(xs[0], xs[1], xs[1]),
    lambda xs, a: _layer_norm(*xs),
    weight=4,
)
_add(
    "rms_norm",
    2,
    _normed,
    lambda adapter, xs, a: adapter.rms_norm(*xs),
    lambda xs, a: xs[0] / np.sqrt((xs[0] ** 2).mean(-1, keepdims=True) + 1e-5) * xs[1],
    weight=4,
)
_add(
    "cross_entropy",
    2,
    _classified,
    lambda adapter, xs, a: adapter.cross_entropy(xs[0], xs[1] % xs[0].shape[1], *a),
    lambda xs, a: _cross_entropy(*xs, *a),
    weight=6,
)


def _small_and_dim(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    """Choose the dimension of logsumexp.

    None if numbers are so large that ``exp`` could overflow, because some frameworks do not subtract the maximum first.
    """
    return None if np.abs(x).max(initial=0.0) > (10 if x.dtype == np.float16 else 80) else _full_dim(rng, x)


_add(
    "logsumexp",
    1,
    _small_and_dim,
    lambda adapter, xs, a: adapter.logsumexp(xs[0], *a),
    lambda xs, a: np.log(np.exp(xs[0]).sum(*a)),
    weight=0.5,
)


# ---------------------------------------------------------------------------- further views
def _diagonal(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    dims = _two_dims(rng, x)
    return None if dims is None else (int(rng.integers(-1, 2)), *dims)


def _strided(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    """Choose sizes and strides of a view of a tensor whose memory is in row-major order."""
    if not x.size or not x.flags.c_contiguous:
        return None
    sizes, strides, last = [], [], 0
    for _ in range(int(rng.integers(1, 3))):
        stride = int(rng.integers(1, 4))
        sizes.append(int(rng.integers(1, (x.size - 1 - last) // stride + 2)))
        strides.append(stride)
        last += (sizes[-1] - 1) * stride
    return tuple(sizes), tuple(strides)


def _as_strided(x: np.ndarray, sizes: tuple, strides: tuple) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(x, sizes, [stride * x.itemsize for stride in strides])


_add(
    "diagonal",
    1,
    _diagonal,
    lambda adapter, xs, a: adapter.diagonal(xs[0], *a),
    # The result of NumPy is not writeable.
    lambda xs, a: _writeable(xs[0].diagonal(*a), xs[0]),
)
_add(
    "as_strided",
    1,
    _strided,
    lambda adapter, xs, a: adapter.as_strided(xs[0], *a),
    lambda xs, a: _as_strided(xs[0], *a),
    weight=0.5,
)
_add("leaf", 1, _of_floats, lambda adapter, xs, a: adapter.leaf(xs[0]), lambda xs, a: xs[0], weight=0.3)


def _writeable(view: np.ndarray, x: np.ndarray) -> np.ndarray:
    view.flags.writeable = x.flags.writeable
    return view


# ---------------------------------------------------------------------------- writes
def _assigned(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    index = _index(rng, x)
    return None if index is None or x.dtype == bool else (*index, 2)


def _set(xs: list, args: tuple) -> Any:
    xs[0][_decode(args[0])] = args[1]
    return xs[0]


def _double(xs: list, args: tuple) -> Any:
    xs[0] *= 2
    return xs[0]


def _accumulate(xs: list, args: tuple) -> Any:
    xs[0] += xs[1]
    return xs[0]


def _number(rng: np.random.Generator, x: np.ndarray) -> tuple | None:
    return None if x.dtype == bool else ()


def _set_at(xs: list, args: tuple) -> Any:
    xs[0][xs[1] % xs[0].shape[0]] = args[0]
    return xs[0]


_add(
    "set_at",
    2,
    lambda rng, x, ids: (2,) if _ids(ids) and ids.ndim and x.ndim and x.shape[0] and _floating(x) else None,
    lambda adapter, xs, a: _set_at(xs, (float(a[0]),)),
    _set_at,
    writes=True,
    weight=3,
)
_add("set", 1, _assigned, lambda adapter, xs, a: _set(xs, (a[0], float(a[1]))), _set, writes=True, weight=4)
_add("double", 1, _number, lambda adapter, xs, a: _double(xs, a), _double, writes=True, weight=4)
_add(
    "accumulate",
    2,
    lambda rng, x, y: () if x.shape == y.shape and _alike(rng, x, y) is not None else None,
    lambda adapter, xs, a: _accumulate(xs, a),
    _accumulate,
    writes=True,
    weight=3,
)
