"""Gradients as DTensors on MindSpore, `value_and_grad` and `grad`, and `scaled_dot_product_attention`.

`mindspore.value_and_grad` and `mindspore.grad` also support distributed parameters. They return each rank's local
gradient as a plain tensor. The functions here return DTensors, placed like the parameter (with ``Replicate`` for
``Partial``). Their norms and sums equal those of a single device. MindSpore is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform import PlatformError, get_platform

__all__ = ["grad", "scaled_dot_product_attention", "value_and_grad"]


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes ``fn`` and its gradients.

    Mirrors `mindspore.value_and_grad`, with DTensors as gradients of distributed inputs and parameters.

    Args:
        fn: function or cell. Its first output is differentiated, or the sum of its elements if it has several. A
            DTensor counts as its global value.
        grad_position: inputs of ``fn`` to differentiate by: an index, several indices, or None for no input.
        weights: parameters to differentiate by.
        has_aux: whether ``fn`` has further outputs, which are not differentiated.
        return_ids: whether each gradient comes with the position of its input or the name of its parameter, for
            `mindspore.get_grad`.
        sens_param: whether the last input of the returned function, or its ``sens``, is the sensitivity (the
            cotangent). It must be distributed if the output is.

    Returns:
        A function of the inputs of ``fn`` that returns (outputs of ``fn``, gradients). Gradients are nested as in
        MindSpore, each with the global shape and the dtype of its input or parameter.

    Raises:
        PlatformError: when the platform of this process is not ``mindspore``.

    Example:
        >>> from hyper_parallel.mindspore import value_and_grad  # doctest: +SKIP
        >>> step = value_and_grad(loss_of, None, network.trainable_params())  # doctest: +SKIP
        >>> loss, gradients = step(batch)  # doctest: +SKIP
        >>> optimizer(gradients)  # doctest: +SKIP
    """
    return _gradients("value_and_grad").value_and_grad(fn, grad_position, weights, has_aux, return_ids, sens_param)


def grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Sequence[Any] | None = None,
    has_aux: bool = False,
    return_ids: bool = False,
    sens_param: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes only the gradients of ``fn``.

    Mirrors `mindspore.grad`, with DTensors as gradients of distributed inputs and parameters.

    Args:
        fn: as in `value_and_grad`, like the other arguments.
        grad_position: inputs of ``fn`` to differentiate by; None for no input.
        weights: parameters to differentiate by.
        has_aux: whether ``fn`` has further outputs.
        return_ids: whether each gradient comes with the position of its input or the name of its parameter.
        sens_param: whether the last input is the sensitivity.

    Returns:
        A function of the inputs of ``fn`` that returns the gradients, or (gradients, further outputs) with ``has_aux``.

    Raises:
        PlatformError: when the platform of this process is not ``mindspore``.

    Example:
        >>> from hyper_parallel.mindspore import grad  # doctest: +SKIP
        >>> gradients = grad(loss_of, None, network.trainable_params())(batch)  # doctest: +SKIP
    """
    return _gradients("grad").grad(fn, grad_position, weights, has_aux, return_ids, sens_param)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Return the attention that `torch.nn.functional.scaled_dot_product_attention` computes, for plain tensors and
    DTensors.

    MindSpore has one kernel for it, on Ascend. This function runs on every device, in plain operations. Samples, heads
    and the sequence of DTensors may be sharded.

    Args:
        query: (..., heads, length, features).
        key: (..., heads, keys, features). Each head serves an equal number of consecutive query heads.
        value: (..., heads, keys, features).
        attn_mask: booleans, true for visible keys, or numbers that are added to the scores.
        dropout_p: probability to drop a weight.
        is_causal: whether a query sees only the keys up to its own position.
        scale: factor of the scores; by default one over the square root of the number of features.

    Returns:
        (..., heads, length, features of the values).

    Raises:
        PlatformError: when the platform of this process is not ``mindspore``.

    Example:
        >>> from hyper_parallel.mindspore import scaled_dot_product_attention  # doctest: +SKIP
        >>> y = scaled_dot_product_attention(q, k, v, is_causal=True)  # doctest: +SKIP

    Source: ``torch.nn.functional.scaled_dot_product_attention``.
    """
    name = "scaled_dot_product_attention"
    _need_mindspore(name, "computes", f"call torch.nn.functional.{name}")
    from hyper_parallel.platform.mindspore.handlers import scaled_attention

    return scaled_attention.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _gradients(asked: str) -> Any:
    """Return the module that computes gradients, which imports MindSpore."""
    _need_mindspore(asked, "differentiates", "call backward() of the loss and read the gradients from the parameters")
    from hyper_parallel.platform.mindspore.gradients import grad as functions

    return functions


def _need_mindspore(asked: str, does: str, instead: str) -> None:
    platform = get_platform()
    if platform.name != "mindspore":
        raise PlatformError(
            f"hyper_parallel.mindspore.{asked} {does} on MindSpore, but the platform of this process is "
            f"{platform.name!r}. Set HYPER_PARALLEL_PLATFORM=mindspore before the program starts; on torch, {instead}"
        )
