"""Low-rank adapters (LoRA) of the peft library on layers that a plan shards.

A layer of peft holds the layer that it adapts, ``base_layer``, and adds ``B(A(dropout(x))) * scaling`` to what that
gives. What is sharded of A and B follows from the style of the base layer, so that both are sharded alike:

* by columns: A stays whole and reads ``x``, which is whole; B is sharded by columns, as the base layer is;
* by rows: A is sharded by rows, as the base layer is, and its few features are all-reduced; B stays whole.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel.attention import head_norms
from hyper_parallel.core.tensor_parallel.base import ModuleStyle, ParallelStyle
from hyper_parallel.core.tensor_parallel.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.rowwise import RowwiseParallel

__all__ = ["adapted_model", "parallelize_adapters", "without_adapters"]


class _DropoutParallel(ModuleStyle):
    """Dropout of features that are sharded: drops what a single device drops."""

    input_layouts = output_layouts = (Shard(-1),)


def adapted_model(model: Any) -> Any:
    """The model of transformers inside of a ``PeftModel``, or ``model``."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def without_adapters(modules: dict[str, Any]) -> dict[str, Any]:
    """Modules by path as they were before layers got adapters: each base layer at the path of the layer around it."""
    adapted = {path: module for path, module in modules.items() if _is_wrapper(module)}
    return {
        path: module.base_layer if path in adapted else module
        for path, module in modules.items()
        if not any(path.startswith(f"{above}.") for above in adapted)
    }


def parallelize_adapters(styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Move the styles of layers with adapters to their base layers, and give the adapters theirs.

    Args:
        styles: by path, of the model `without_adapters`; changed in place.
        modules: all modules of the model, by path.
        mesh: 1-D mesh.

    Raises:
        ValueError: for adapters of another kind on a layer that has a style, and a layer whose inputs or outputs are
            sharded otherwise.
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
        for name in module.lora_A:
            if isinstance(style, ColwiseParallel):
                styles[f"{path}.lora_B.{name}"] = style
            elif isinstance(style, RowwiseParallel):
                styles[f"{path}.lora_A.{name}"] = style
                if style.input_layouts == (Shard(-1),) and getattr(module.lora_dropout[name], "p", 0):
                    styles[f"{path}.lora_dropout.{name}"] = _DropoutParallel()


def _is_wrapper(module: Any) -> bool:
    """Whether a module is one of peft around another: all of them have that as ``base_layer``."""
    return hasattr(module, "base_layer")


def _refuse_copies(styles: dict[str, ParallelStyle], modules: dict[str, Any]) -> None:
    """Of whole modules, which peft keeps beside the trained copy (``modules_to_save``)."""
    for path in styles:
        if hasattr(modules.get(path), "modules_to_save"):
            raise ValueError(
                f"the plan shards {path!r}, of which peft trains a copy of its own ({type(modules[path]).__name__}): "
                f"leave it out of modules_to_save and set requires_grad of its parameters, or take it out of the plan "
                f"with plan={{{path!r}: None}}"
            )


def _check(path: str, module: Any, style: ParallelStyle) -> None:
    kind = type(module).__name__
    take_out = f"leave {path!r} out of target_modules, or take it out of the plan with plan={{{path!r}: None}}"
    adapters = list(getattr(module, "lora_A", ()))
    if not adapters or not hasattr(module, "lora_B"):
        raise ValueError(
            f"the plan shards {path!r}, whose adapter ({kind}) is none of LoRA on a linear layer: what of it "
            f"would have to be sharded is not known; {take_out}"
        )
    for variant in ("lora_magnitude_vector", "lora_variant"):
        if len(getattr(module, variant, ())):
            raise ValueError(
                f"the plan shards {path!r}, whose adapter computes with the whole weight of its layer ({variant}, as "
                f"DoRA does): use LoRA without it, or {take_out}"
            )
    if getattr(module, "merged_adapters", ()):
        raise ValueError(f"the adapters of {path!r} are merged: call unmerge_adapter() before parallelize_model")
    whole = {ColwiseParallel: "input_layouts", RowwiseParallel: "output_layouts"}
    layouts = next((name for cls, name in whole.items() if isinstance(style, cls)), None)
    if not isinstance(style, NoParallel) and (layouts is None or getattr(style, layouts) != (Replicate(),)):
        raise ValueError(
            f"the plan gives {path!r}, which has LoRA adapters, the style {style!r}: their gradients are known to be "
            f"right for layers by columns that read whole inputs and by rows that give whole outputs; {take_out}"
        )
