"""`check_plain_code`: check the code between the styled modules of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.plain_code.contexts import follow, platform_of
from hyper_parallel.core.plain_code.following import Following

__all__ = ["check_plain_code"]


@contextmanager
def check_plain_code(model: Any) -> Iterator[Following]:
    """Check operations on plain tensors inside this context, in a parallelised model and its loss.

    The report lists operations whose result or gradient on local tensors differs from that on unsharded tensors. The
    sharding rules judge each operation between styled modules. This needs no communication and compares no values, so
    all ranks have the same report. Results do not change, but operations are slower.

    Args:
        model: a module to which `parallelize_module` was applied, or a module that contains one.

    Returns:
        The report, which is complete at the end of the context. ``print`` shows it, and it is true without findings.
        Each entry of ``findings`` has the line of the program, the path of the module, the fact and the remedy.
        ``unknown`` lists operations that could not be followed; the report says nothing about these.

    Raises:
        TypeError: if ``model`` is not a module, or the platform cannot follow programs.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, check_plain_code, init_device_mesh, parallelize_module
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> _ = parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        >>> with check_plain_code(model) as checked:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> checked.findings  # one rank has all
        []

    Source: torchtitan's type checker for plain SPMD code, which uses annotations instead of plans.
    """
    platform = platform_of(model)
    if not isinstance(model, platform.Module):
        raise TypeError(
            f"check_plain_code takes a {platform.Module.__name__} of the platform {platform.name!r}, got "
            f"{type(model).__name__}"
        )
    with follow(model, platform) as following:
        handles = (
            platform.register_forward_pre_hook(
                model, lambda module, args, kwargs: following.begins((args, kwargs)), prepend=True, with_kwargs=True
            ),
            platform.register_forward_hook(model, lambda module, args, output: following.gives(output)),
        )
        try:
            yield following
        finally:
            for handle in handles:
                handle.remove()
