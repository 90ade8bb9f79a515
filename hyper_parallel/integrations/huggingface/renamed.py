"""Files in which a tensor of the model has another name, or consists of several tensors. transformers has a table of
both cases: ``embed_out`` of GPT-NeoX is ``lm_head`` now, and the matrices of all experts are one parameter.
transformers applies the table to full tensors during loading. This module uses the table to find the slices of each
file that a rank reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hyper_parallel.checkpoint.index import Part, StoredTensor

__all__ = ["arrangement"]

Tensors = dict[str, StoredTensor]


def arrangement(model: Any) -> Callable[[Tensors], Tensors] | None:
    """Return a function from the tensors in files, by name, to the tensors of ``model``. Return None if transformers
    has no such table."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # releases before the table
        return None
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = dict.fromkeys(model.state_dict(), True)

    def arrange(stored: Tensors) -> Tensors:
        arranged: Tensors = {}
        several: dict[str, dict[str, list[str]]] = {}
        for name, tensor in stored.items():
            new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if pattern is not None:
                several.setdefault(new, {}).setdefault(pattern, []).append(name)
            elif new in arranged:
                raise ValueError(f"two tensors of the files would get the name {new!r}; {name!r} is the second of them")
            else:
                arranged[new] = tensor
        for new, by_pattern in several.items():
            converter = next(c for c in converters if next(iter(by_pattern)) in c.source_patterns)
            groups = [sorted(by_pattern.get(pattern, ()), key=_number) for pattern in converter.source_patterns]
            arranged[new] = _one(new, [[stored[name] for name in names] for names in groups], converter)
        return arranged

    return arrange


def _one(name: str, groups: list[list[StoredTensor]], converter: Any) -> StoredTensor:
    """Return the tensor of the model that is made of groups of tensors in files.

    Raises:
        ValueError: if they differ in shape or dtype, or are transformed by an unsupported operation.
    """
    operations = list(converter.operations)
    kinds = [type(operation).__name__ for operation in operations]
    everything = [tensor for group in groups for tensor in group]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]) or (
        "MergeModulelist" in kinds and operations[0].dim != 0
    ):
        raise ValueError(
            f"transformers applies {', '.join(kinds)} to {len(everything)} tensors of the files to make {name!r}. This "
            "is not supported here: load the model with from_pretrained, and then call parallelize_model"
        )
    alike = {(tensor.dtype, len(tensor.shape)) for tensor in everything}
    stacks = "MergeModulelist" in kinds
    joined = operations[-1].dim if kinds[-1] == "Concatenate" else None
    sizes = {len(group) for group in groups}
    shapes = [{tensor.shape for tensor in group} for group in groups]
    if len(alike) != 1 or len(sizes) != 1 or 0 in sizes or any(len(shape) != 1 for shape in shapes):
        raise ValueError(f"the files lack parts of {name!r}, or have parts of wrong shapes: {shapes}")
    count = sizes.pop()
    if (not stacks and count != 1) or (joined is None and len(groups) != 1):
        raise ValueError(f"the files have {count} tensors for each part of {name!r}, but each part must be one tensor")
    parts: list[Part] = []
    start, shape = 0, [0]
    for group in groups:
        inner = group[0].shape
        shape = [count, *inner] if stacks else list(inner)
        for i, tensor in enumerate(group):
            offsets, part_sizes = [0] * len(shape), [1, *inner] if stacks else list(inner)
            if stacks:
                offsets[0] = i
            if joined is not None:
                offsets[joined] = start
            (whole,) = tensor.parts
            parts.append(Part(tuple(offsets), tuple(part_sizes), whole.file, whole.entry))
        start += 0 if joined is None else shape[joined]
    if joined is not None:
        shape[joined] = start
    return StoredTensor(everything[0].dtype, tuple(shape), "plain", tuple(parts))


def _number(name: str) -> list[int]:
    """Return the numbers in a name as a sorting key, so that expert 10 comes after 9."""
    return [int(digits) for digits in re.findall(r"\d+", name)]
