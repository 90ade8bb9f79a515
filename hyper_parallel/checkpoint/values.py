"""Numbers, strings and containers as JSON, and back. Nothing is evaluated."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.checkpoint.errors import CheckpointError

__all__ = ["KIND", "check", "decode", "encode", "is_key", "is_plain"]

#: The key of a JSON object that represents a value that JSON lacks.
KIND = "$"


def is_plain(x: Any) -> bool:
    """Return whether ``x`` is a single value, and no container or tensor."""
    return x is None or isinstance(x, (bool, int, float, str, bytes, bytearray, np.ndarray, np.generic))


def is_key(x: Any) -> bool:
    """Return whether ``x`` may be the key of a dict: a plain value outside NumPy, or a tuple of such values."""
    if isinstance(x, tuple):
        return all(map(is_key, x))
    return is_plain(x) and not isinstance(x, (np.ndarray, bytearray))


def encode(x: Any) -> Any:
    """Return a plain value, or a tuple of plain values, as JSON."""
    if isinstance(x, tuple):
        return {KIND: "tuple", "items": [encode(value) for value in x]}
    if isinstance(x, np.generic):
        return {KIND: "scalar", "dtype": x.dtype.str, "data": _text(x.tobytes())}
    if isinstance(x, np.ndarray):
        if x.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be saved in a checkpoint: use an array of numbers")
        return {KIND: "array", "dtype": x.dtype.str, "shape": [*x.shape], "data": _text(x.tobytes())}
    if isinstance(x, (bytes, bytearray)):
        return {KIND: "bytes", "data": _text(x)}
    if isinstance(x, float) and not math.isfinite(x):
        return {KIND: "float", "value": repr(float(x))}
    if isinstance(x, bool) or x is None:
        return x
    return next(kind(x) for kind in (int, float, str) if isinstance(x, kind))


def decode(x: Any, special: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value that `encode` has encoded, in containers too.

    Args:
        x: JSON.
        special: function that decodes an object of a kind that this module does not know.

    Raises:
        CheckpointError: for JSON that no save writes.
    """
    if isinstance(x, list):
        return [decode(value, special) for value in x]
    if not isinstance(x, dict):
        return x
    if KIND not in x:
        return {name: decode(value, special) for name, value in x.items()}
    try:
        return _decode(x, special)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"a value in the index is damaged: {str(x)[:100]} ({error})") from error


def _decode(x: dict[str, Any], special: Callable[[dict[str, Any]], Any] | None) -> Any:
    kind = x[KIND]
    if kind == "tuple":
        return tuple(decode(value, special) for value in x["items"])
    if kind == "dict":
        return {decode(key, special): decode(value, special) for key, value in x["items"]}
    if kind == "float":
        return float(x["value"])
    if kind == "bytes":
        return _bytes(x["data"])
    if kind == "scalar":
        return np.frombuffer(_bytes(x["data"]), np.dtype(x["dtype"]))[0]
    if kind == "array":
        return np.frombuffer(bytearray(_bytes(x["data"])), np.dtype(x["dtype"])).reshape(x["shape"])
    if special is None:
        raise ValueError(f"{kind!r} is not a known kind of value")
    return special(x)


#: Kind -> the further keys of its object, and their types.
_KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "tuple": {"items": list},
    "dict": {"items": list},
    "float": {"value": str},
    "bytes": {"data": str},
    "scalar": {"dtype": str, "data": str},
    "array": {"dtype": str, "shape": list, "data": str},
    "tensor": {"name": str},
    "module": {},
    "object": {"state": (dict, list, str, int, float, type(None))},
    "optimizer": {"groups": list, "numbers": dict},
    "ranks": {"path": str, "values": list, "of": list},
}


def check(x: Any) -> None:
    """Raise ValueError if ``x``, read from an index, is neither a result of `encode` nor the description of a
    module."""
    if isinstance(x, list):
        for value in x:
            check(value)
    if not isinstance(x, dict):
        return
    if KIND in x:
        keys = _KEYS.get(x[KIND]) if isinstance(x[KIND], str) else None
        if keys is None:
            raise ValueError(f"a value is of the unknown kind {str(x[KIND])[:100]!r}")
        if any(not isinstance(x.get(key), types) for key, types in keys.items()):
            raise ValueError(f"a value lacks an entry, or an entry has the wrong type: {str(x)[:100]}")
        if x[KIND] == "dict" and any(not isinstance(pair, list) or len(pair) != 2 for pair in x["items"]):
            raise ValueError(f"a dict has items that are not pairs: {str(x)[:100]}")
        if x[KIND] == "ranks" and not {*x["of"]} <= {*range(len(x["values"]))}:
            raise ValueError(f"the per-rank values of some ranks are missing: {str(x['of'])[:100]}")
        if x[KIND] == "optimizer":
            for group in x["groups"]:
                if (
                    not isinstance(group, dict)
                    or not isinstance(group.get("parameters"), list)
                    or "options" not in group
                ):
                    raise ValueError(f"a parameter group of an optimizer is invalid: {str(group)[:100]}")
    for value in x.values():
        check(value)


def _text(x: Any) -> str:
    return base64.b64encode(bytes(x)).decode()


def _bytes(x: str) -> bytes:
    return base64.b64decode(x, validate=True)
