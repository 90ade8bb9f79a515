"""Random damage of checkpoints and weights, which knows how they are made up."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["damage"]

#: Values that come into JSON in the place of something else.
_STRANGE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        2**70,
        0.5,
        float("inf"),
        float("nan"),
        "",
        "a/b",
        "../x",
        "*",
        "x",
    ),
    *([], {}, [[]], {"$": "tensor", "name": "x"}, {"$": "code"}, [0, 0], "F32", "float64", "9" * 5000),
)


def damage(draw: random.Random, directory: Path, older: Path) -> list[str]:
    """Damage files of a directory.

    Args:
        draw: the random generator.
        directory: of a checkpoint, or of weights for Hugging Face.
        older: the same of other values, files of which may get in between.

    Returns:
        The damage, for people: one thing or two.
    """
    return [draw.choice(_DAMAGES)(draw, directory, older) for _ in range(draw.choice((1, 1, 1, 2)))]


def _file(draw: random.Random, directory: Path) -> Path:
    """A file, an index as often as all others together."""
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    if not paths:
        (directory / "left.json").write_bytes(b"{}")
        return directory / "left.json"
    indexes = [path for path in paths if path.suffix == ".json"]
    return draw.choice(indexes) if indexes and draw.random() < 0.5 else draw.choice(paths)


# ---------------------------------------------------------------------- whole files
def _rename(draw: random.Random, directory: Path, older: Path) -> str:
    path = _file(draw, directory)
    new = path.with_name(
        draw.choice((f".{path.name}", f"{path.name}.bak", "model.safetensors", "rank-00007.safetensors"))
    )
    os.replace(path, new)
    return f"{path.name} is called {new.name}"


def _swap(draw: random.Random, directory: Path, older: Path) -> str:
    one, other = _file(draw, directory), _file(draw, directory)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0]), one.write_bytes(contents[1])
    return f"{one.name} and {other.name} in each other's place"


def _copy(draw: random.Random, directory: Path, older: Path) -> str:
    one, other = _file(draw, directory), _file(draw, directory)
    other.write_bytes(one.read_bytes())
    return f"{one.name} in the place of {other.name}"


def _delete(draw: random.Random, directory: Path, older: Path) -> str:
    path = _file(draw, directory)
    path.unlink()
    return f"{path.name} is gone"


def _replace(draw: random.Random, directory: Path, older: Path) -> str:
    path = _file(draw, directory)
    kind = draw.choice(("older", "older", "random", "zeros", "nothing", "text", "directory", "pipe", "link", "loop"))
    if kind == "older" and (older / path.name).is_file():
        shutil.copy(older / path.name, path)
        return f"{path.name} of another save"
    size = path.stat().st_size
    path.unlink()
    contents = {"random": draw.randbytes(size), "zeros": bytes(size), "text": b"[" * 5000}
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(older / path.name)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(contents.get(kind, b""))
    return f"{path.name} is a {kind}"


# ---------------------------------------------------------------------- bytes
def _cut(draw: random.Random, directory: Path, older: Path) -> str:
    path = _file(draw, directory)
    content = path.read_bytes()
    if draw.random() < 0.3:
        path.write_bytes(content + draw.randbytes(draw.choice((1, 8, 4096))))
        return f"{path.name} is longer"
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at] + content[at + draw.choice((1, 8, len(content))) :])
    return f"{path.name} lacks bytes at {at}"


def _flip(draw: random.Random, directory: Path, older: Path) -> str:
    path = _file(draw, directory)
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(len(content), 1))
    for place in range(at, min(at + draw.choice((1, 1, 1, 2, 8)), len(content))):
        content[place] = draw.choice((content[place] ^ 1 << draw.randrange(8), draw.randrange(256)))
    path.write_bytes(content)
    return f"{path.name} has other bytes at {at}"


# ---------------------------------------------------------------------- tables
def _table(draw: random.Random, directory: Path, older: Path) -> str:
    """Damage the JSON of an index or a header."""
    path = _file(draw, directory)
    content = path.read_bytes()
    start, end = 0, len(content)
    if path.suffix != ".json":
        start, end = 8, min(8 + struct.unpack("<Q", content[:8].ljust(8))[0], len(content))
    try:
        parsed = json.loads(content[start:end])
    except (ValueError, RecursionError):
        return f"{path.name} has no table"
    done = _change(draw, parsed)
    text = json.dumps(parsed, separators=(",", ":")).encode()
    if path.suffix != ".json":
        text = text.ljust(end - start)  # as long as it was, so that the data is where it was
        text = struct.pack("<Q", len(text)) + text
    path.write_bytes(text + content[end:])
    return f"{path.name}: {done}"


def _change(draw: random.Random, parsed: Any) -> str:
    places: list[tuple[Any, Any]] = []

    def visit(x: Any) -> None:
        for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
            places.append((x, key))
            visit(value)

    visit(parsed)
    if not places:
        return "nothing"
    (x, key), (y, other) = draw.choice(places), draw.choice(places)
    kind = draw.choice(("delete", "rename", "swap", "copy", "replace", "number"))
    if kind == "delete":
        del x[key]
    elif kind == "rename" and isinstance(x, dict):
        x[draw.choice(("x", f"{key}x", "", "sum", "a/b"))] = x.pop(key)
    elif kind == "swap":
        x[key], y[other] = copy.deepcopy((y[other], x[key]))  # one may be in the other
    elif kind == "copy":
        x[key] = copy.deepcopy(y[other])
    elif kind == "number" and isinstance(x[key], int):
        x[key] += draw.choice((-1, 1, 8, 1 << 40))
    else:
        x[key] = draw.choice(_STRANGE)
    return f"{kind} of {key!r}"


_DAMAGES: tuple[Callable[[random.Random, Path, Path], str], ...] = (
    *(_rename, _swap, _copy, _delete, _replace, _cut),
    *(_flip,) * 4,
    *(_table,) * 6,
)
