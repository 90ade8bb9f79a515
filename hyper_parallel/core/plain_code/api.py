"""`check_plain_code`: follow a program between the styled modules of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.plain_code.contexts import follow, platform_of
from hyper_parallel.core.plain_code.following import Following

__all__ = ["check_plain_code"]


@contextmanager
def check_plain_code(model: Any) -> Iterator[Following]:
    """Inside, the plain code of a parallelised model is followed, and its loss as well. The report names
    operations that compute something else on a part than on the whole. Gradients count too.

    Each operation between styled modules is asked of the sharding rules. Nothing is communicated for it, and no values
    are compared, so all ranks find the same. Numbers do not change. Operations become slower.

    Args:
        model: a module to which `parallelize_module` was applied, or one that contains such modules.

    Returns:
        The report, which is complete at the end of the context: ``print`` shows it, ``findings`` has each finding with
        the line of the program, the path of the module, the fact and the remedy. It is true where nothing was found.
        ``unknown`` names operations that could not be followed: of these nothing is said.

    Raises:
        TypeError: when ``model`` is no module, or for a platform that cannot follow programs.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, check_plain_code, init_device_mesh, parallelize_module
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> _ = parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        >>> with check_plain_code(model) as checked:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> checked.findings  # one rank has all
        []

    Source: the checker of types for plain SPMD code of torchtitan, which wants annotations where this has plans.
    """
    platform = platform_of(model)
    if not isinstance(model, platform.Module):
        raise TypeError(
            f"check_plain_code takes a {platform.Module.__name__} of the platform {platform.name!r}, got "
            f"{type(model).__name__}"
        )
    with follow(model, platform) as following:
        handle = platform.register_forward_hook(model, lambda module, args, output: following.gives(output))
        try:
            yield following
        finally:
            handle.remove()
