"""Parsing of models, plans, meshes and inputs from a command line."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
import traceback
from pathlib import Path
from typing import Any, cast

from hyper_parallel.cli.output import UsageError
from hyper_parallel.planning.llama import MODELS, llama_plan
from hyper_parallel.platform.dry import dry_world

__all__ = ["bytes_of", "inputs_of", "mesh_of", "model_of", "object_at", "plan_of", "ranks_of", "said_of"]

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def mesh_of(text: str) -> dict[str, int]:
    """Parse ``"dp=64,tp=8"``, or ``"8"`` for one dimension called tp.

    A mesh without tp gets a tp of one rank.

    Example:
        >>> mesh_of("dp=64,tp=8"), mesh_of("8"), mesh_of("dp=64")
        ({'dp': 64, 'tp': 8}, {'tp': 8}, {'dp': 64, 'tp': 1})
    """
    found: dict[str, int] = {}
    for part in (f"tp={text}" if text.isdigit() else text).split(","):
        name, sign, size = (word.strip() for word in part.partition("="))
        if not sign or re.fullmatch("[0-9]{1,18}", size) is None or not name:
            raise UsageError(f"--mesh {text!r}: write a number of ranks, or sizes by name such as dp=64,tp=8")
        if name in found:
            raise UsageError(f"--mesh {text!r}: the dimension {name} appears twice")
        if int(size) < 1:
            raise UsageError(f"--mesh {text!r}: each dimension must have at least 1 rank")
        found[name] = int(size)
    return {**found, "tp": 1} if list(found) == ["dp"] else found


def bytes_of(text: str) -> float:
    """Return the bytes in ``"80GB"``, ``"64GiB"`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size in bytes: write 80GB, 64GiB or a number")
    return float(match.group(1)) * _UNITS[match.group(2).lower()]


def object_at(text: str) -> Any:
    """Return the object that ``"package.module:name"`` or ``"file.py:name"`` names."""
    place, sign, name = text.rpartition(":")
    if not sign or not place or not name:
        raise UsageError(f"{text!r}: write package.module:name, or file.py:name")
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UsageError(f"{text!r}: the file {place!r} does not exist")
    sys.path.insert(0, "" if file is None else str(file.parent))
    try:
        found = importlib.import_module(place) if file is None else _module_of(file)
    except (Exception, SystemExit) as error:  # the code is the user's: anything may be wrong with it
        raise UsageError(f"{text!r} cannot be imported: {said_of(error)}") from error
    place = place if file is None else file.stem
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"{text!r}: {place} has no {attribute!r}")
        found = getattr(found, attribute)
    return found


def _module_of(file: Path) -> Any:
    """Import a file once, under a unique module name. The file may have the name of a module of Python."""
    name = f"{file.stem} of {file.parent}"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(cast("Any", specification))
        sys.modules[name] = module  # classes and functions that it defines look for their module there
        try:
            cast("Any", specification).loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def model_of(text: str, dtype: str | None) -> Any:
    """Return a model by name, or the result of the function that ``text`` names. The tensors of the model have no data,
    if the framework has such tensors."""
    if text not in MODELS and ":" not in text:
        raise UsageError(
            f"no model is called {text!r}: choose one of {', '.join(MODELS)}. Or pass package.module:function or "
            "file.py:function, a function that returns a model"
        )
    with dry_world(1) as platform, platform.without_data():
        model = platform.make_decoder(MODELS[text]) if text in MODELS else object_at(text)
        if not isinstance(model, platform.Module):
            if not callable(model):
                raise UsageError(f"--model {text} is {model!r}: name a function that returns a model")
            try:
                model = model()
            except (Exception, SystemExit) as error:
                raise UsageError(f"--model {text} fails: {said_of(error)}") from error
        if not isinstance(model, platform.Module):
            kind, name = type(model).__name__, platform.name.removeprefix("dry-")
            raise UsageError(f"--model {text} returned a {kind}: it must return a module of {name}")
        if dtype is not None:
            try:
                model = model.to(_dtype(platform, dtype))
            except TypeError as error:
                raise UsageError(f"--dtype {dtype} cannot be the dtype of parameters: {error}") from error
    return model


def said_of(error: BaseException) -> str:
    """Return the message of an error. If a line of the user's code raised the error, the message contains the line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = str(Path(__file__).parents[1])
    where = "" if last.filename.startswith((ours, "<")) else f" (line {last.lineno} of {last.filename})"
    return f"{type(error).__name__}: {error}{where}"


def plan_of(text: str | None, model: str, sequence: bool) -> Any:
    """Return the plan that ``text`` names, or the plan of a model by name."""
    if text is None:
        if model not in MODELS:
            raise UsageError(
                "--plan is missing: pass package.module:name of a dict of styles or a function of model and mesh"
            )
        return llama_plan(sequence)
    found = object_at(text)
    return found


def inputs_of(texts: list[str], model: str, batch: int, length: int) -> list[Any]:
    """Return tensors such as ``"int64[2,4096]"`` or ``"float32[2,16]"``; by default tokens of shape (batch, length)."""
    found = []
    for text in texts or [f"int64[{batch},{length}]"]:
        match = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", text)
        if match is None:
            raise UsageError(f"--input {text}: write dtype[sizes], such as int64[2,4096]")
        with dry_world(1) as platform, platform.without_data():
            dtype = _dtype(platform, match.group(1))
            try:
                shape = tuple(map(int, match.group(2).split(",")))
                found.append(platform.factory("full", shape, 0, dtype))
            except Exception as error:  # each framework has its own for sizes that no tensor has
                said = str(error).split("\n")[0]
                raise UsageError(f"an input {text[:60]} cannot be made: {type(error).__name__}: {said}") from error
    return found


def _dtype(platform: Any, name: str) -> Any:
    if name not in platform.dtypes:
        raise UsageError(f"no dtype is called {name!r}: choose one of {', '.join(platform.dtypes)}")
    return platform.dtypes[name]


def ranks_of(mesh: dict[str, int]) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(mesh.values())
