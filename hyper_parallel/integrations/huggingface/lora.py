"""Low-rank adapters (LoRA) of the peft library on layers that a plan shards.

A layer of peft holds the adapted layer, ``base_layer``, and adds ``B(A(dropout(x))) * scaling`` to its output. The
style of the base layer determines which of A and B is sharded:

* Column-wise: A is replicated and reads the replicated ``x``. B is sharded column-wise, as the base layer is.
* Row-wise: A is sharded row-wise, as the base layer is, and its few features are all-reduced. B is replicated.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.checks.attention import head_norms
from hyper_parallel.core.tensor_parallel.styles.base import APPLIED, ModuleStyle, ParallelStyle, is_styled
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel

__all__ = ["adapted_model", "parallelize_adapters", "place_adapters", "without_adapters"]


class _DropoutParallel(ModuleStyle):
    """Dropout of sharded features, which drops the same elements as on a single device."""

    input_layouts = output_layouts = (Shard(-1),)


def parallelize_adapters(model: Any, device_mesh: DeviceMesh | None = None, *, src_data_rank: int | None = 0) -> Any:
    """Shard LoRA adapters that were added to a model after `parallelize_model`, by the layers that they adapt.

    Adapters that were added before `parallelize_model` are sharded by it.

    Args:
        model: the result of peft for a parallelised model, or a model that contains adapters.
        device_mesh: the mesh of `parallelize_model`.
        src_data_rank: rank of the mesh whose adapters all ranks get, because peft draws them on each rank. None keeps
            each rank's local values.

    Returns:
        ``model``.

    Raises:
        ValueError: for a model without unsharded adapters on sharded layers, and for adapters that `parallelize_model`
            refuses. Nothing has been changed then.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel import ColwiseParallel, init_device_mesh, parallelize_module
        >>> from hyper_parallel.integrations.huggingface import parallelize_adapters
        >>> class Adapted(nn.Module):  # as a layer of peft is
        ...     def __init__(self, layer):
        ...         super().__init__()
        ...         self.base_layer = layer
        ...         self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        ...         self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        ...         self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = nn.Sequential(Adapted(parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel())))
        >>> parallelize_adapters(model, mesh)[0].lora_B["default"].weight.placements
        (Shard(dim=0),)

    Source: peft's LoRA on torch's tensor parallelism.
    """
    mesh = resolve_mesh(device_mesh, "parallelize_adapters")
    platform = bind_platform(mesh.platform)
    styles: dict[str, ParallelStyle] = {}
    for path, module in platform.named_modules(model):
        if not _is_wrapper(module):
            continue
        style = _style_of(module.base_layer)
        if style is not None:
            _check(path, module, style)
            styles |= {
                below: given
                for below, given in _styles_of_adapters(path, module, style).items()
                if not is_styled(model.get_submodule(below))
            }
    if not styles:
        raise ValueError(
            "parallelize_adapters found no unsharded LoRA adapters on sharded layers: call parallelize_model, add "
            "adapters, and then call parallelize_adapters"
        )
    parallelize_module(model, mesh, dict(styles), src_data_rank=src_data_rank)
    return model


def adapted_model(model: Any) -> Any:
    """Return the transformers model inside a ``PeftModel``, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def without_adapters(modules: dict[str, Any]) -> dict[str, Any]:
    """Return the modules by path as if no adapters were added: the path of a wrapper leads to its base layer."""
    adapted = {path: module for path, module in modules.items() if _is_wrapper(module)}
    return {
        path: module.base_layer if path in adapted else module
        for path, module in modules.items()
        if not any(path.startswith(f"{above}.") for above in adapted)
    }


def place_adapters(styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Move the styles of layers with adapters to their base layers, and add styles for the adapters.

    Args:
        styles: styles by path, for the modules of `without_adapters`; changed in place.
        modules: all modules of the model, by path.
        mesh: 1-D mesh.

    Raises:
        ValueError: for unsupported adapters on a layer that has a style, and for a layer whose inputs or outputs are
            sharded in another way.
    """
    adapted = {path: module for path, module in modules.items() if _is_wrapper(module) and path in styles}
    _refuse_copies(styles, modules)
    if not adapted:
        return
    plain = without_adapters(modules)
    matches = [(path, plain[path], style) for path, style in styles.items()]
    for path, _, style in head_norms(matches, plain, mesh):
        styles[path] = style
    for path, module in adapted.items():
        style = styles.pop(path)
        _check(path, module, style)
        styles[f"{path}.base_layer"] = style
        styles |= _styles_of_adapters(path, module, style)


def _styles_of_adapters(path: str, module: Any, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return styles of the adapters by path. They follow from the style of the base layer of the ``module`` at
    ``path``."""
    found: dict[str, ParallelStyle] = {}
    for name in module.lora_A:
        if isinstance(style, ColwiseParallel):
            found[f"{path}.lora_B.{name}"] = style
        elif isinstance(style, RowwiseParallel):
            found[f"{path}.lora_A.{name}"] = style
            if style.input_layouts == (Shard(-1),) and getattr(module.lora_dropout[name], "p", 0) > 0:
                found[f"{path}.lora_dropout.{name}"] = _DropoutParallel()
    return found


def _style_of(module: Any) -> ParallelStyle | None:
    """Return the style that was applied to a module's parameters, or None."""
    return next((style for style, _ in getattr(module, APPLIED, ()) if isinstance(style, ModuleStyle)), None)


def _is_wrapper(module: Any) -> bool:
    """Return whether a module is a peft wrapper around another module, which all wrappers have as ``base_layer``."""
    return hasattr(module, "base_layer")


def _refuse_copies(styles: dict[str, ParallelStyle], modules: dict[str, Any]) -> None:
    """Raise ValueError if the plan shards a module that peft copies for training (``modules_to_save``)."""
    for path in styles:
        if hasattr(modules.get(path), "modules_to_save"):
            raise ValueError(
                f"the plan shards {path!r}, but peft trains a copy of it ({type(modules[path]).__name__}). Leave "
                f"{path!r} out of modules_to_save and set requires_grad of its parameters, or remove it from the plan "
                f"with plan={{{path!r}: None}}"
            )


def _gives_whole(style: ParallelStyle) -> bool:
    weight = isinstance(style, (ColwiseParallel, RowwiseParallel))
    return weight and style.input_layouts == style.output_layouts == (Replicate(),)  # type: ignore[attr-defined]


def _check(path: str, module: Any, style: ParallelStyle) -> None:
    kind = type(module).__name__
    take_out = f"leave {path!r} out of target_modules, or remove {path!r} from the plan with plan={{{path!r}: None}}"
    if len(getattr(module, "lora_embedding_A", ())) and _gives_whole(style):
        return  # each rank computes the adapter in whole, and adds it to a whole output
    if not len(getattr(module, "lora_A", ())) or not hasattr(module, "lora_B"):
        raise ValueError(
            f"the plan shards {path!r}, but its adapter ({kind}) is not LoRA on a linear layer, so its sharding is "
            f"unknown: {take_out}"
        )
    for variant in ("lora_magnitude_vector", "lora_variant"):
        if len(getattr(module, variant, ())):
            raise ValueError(
                f"the plan shards {path!r}, but its adapter needs the full weight of the layer ({variant}, as in "
                f"DoRA): use LoRA without this variant, or {take_out}"
            )
    if getattr(module, "merged_adapters", ()):
        raise ValueError(f"the adapters of {path!r} are merged: call unmerge_adapter() before parallelize_model")
    known = (
        isinstance(style, NoParallel)
        or (isinstance(style, ColwiseParallel) and style.input_layouts == (Replicate(),))
        or (isinstance(style, RowwiseParallel) and style.output_layouts == (Replicate(),))
    )
    if not known:
        raise ValueError(
            f"the plan has the style {style!r} for {path!r}, which has LoRA adapters. Adapters are supported on "
            "column-wise layers with replicated inputs and row-wise layers with replicated outputs. Otherwise "
            f"{take_out}"
        )
