"""Modules: layers that a plan can shard, and how a tree of modules is walked, read and changed.

A backend lists the classes of its linear layers, embeddings and norms, such as in `ModuleRole.linear_kinds`. A backend
also visits the modules of a tree, parents first, puts hooks around a forward, and replaces forwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["APPLIED", "ModuleKind", "ModuleRole"]

#: Attribute of a module: a list of (style, mesh) for the styles that core has applied to it.
APPLIED = "_hyper_parallel_styles"

Tensor = Any
Module = Any
Layout = Any


@dataclass(frozen=True)
class ModuleKind:
    """Attribute names of the parameters that styles shard, for the modules of one class.

    Attributes:
        weight: attribute of the weight.
        bias: attribute of the bias, which may be absent or None on a module; None for a class without bias.
        out_dim: dimension of a linear layer's weight that holds the output features: 0 for (out, in), 1 for (in, out).
    """

    weight: str = "weight"
    bias: str | None = "bias"
    out_dim: int = 0


class ModuleRole(ABC):
    """Modules, and the parameters that they hold."""

    Module: Any  # the framework's class of modules
    #: Classes of linear and embedding layers, with the attributes of their parameters; subclasses count too.
    linear_kinds: ClassVar[dict[type, ModuleKind]]
    embedding_kinds: ClassVar[dict[type, ModuleKind]]
    #: class -> function that returns how many last dimensions a module normalises, or None if unknown.
    norm_kinds: ClassVar[dict[type, Callable[[Module], int | None]]] = {}

    def is_linear_module(self, module: Module) -> bool:
        """Return whether ``module`` computes ``x @ weight.T + bias``, or ``x @ weight + bias`` if its kind says so."""
        return _kind_of(module, self.linear_kinds) is not None

    def is_embedding_module(self, module: Module) -> bool:
        """Return whether ``module`` looks up rows in a weight of shape (num_embeddings, embedding_dim)."""
        return _kind_of(module, self.embedding_kinds) is not None

    def kind_of(self, module: Module) -> ModuleKind:
        """Return the attribute names of a linear or embedding module.

        Raises:
            TypeError: for another module.
        """
        kind = _kind_of(module, self.linear_kinds) or _kind_of(module, self.embedding_kinds)
        if kind is None:
            raise TypeError(f"{type(module).__name__} is not a linear or embedding module")
        return kind

    def normalized_dims(self, module: Module) -> int | None:
        """Return how many last dimensions ``module`` normalises. None unless its exact class is a norm of the
        framework, or registered."""
        dims = self.norm_kinds.get(type(module))
        return None if dims is None else dims(module)

    def register_linear_module(
        self, cls: type, *, weight: str = "weight", bias: str | None = "bias", out_dim: int = 0
    ) -> None:
        """Let `ColwiseParallel` and `RowwiseParallel` treat ``cls`` as a linear layer.

        Its forward must compute ``x @ weight.T + bias`` from the attributes with operations of the framework.

        Args:
            cls: class of modules, subclasses included.
            weight: attribute of the weight, of shape (out_features, in_features).
            bias: attribute of the bias, of shape (out_features,); None for a class without one.
            out_dim: 1 for a weight of shape (in_features, out_features), as GPT-2's Conv1D has it.

        Raises:
            TypeError: when ``cls`` is no class. ValueError: for another ``out_dim``.

        Example:
            >>> import torch
            >>> from hyper_parallel import get_platform
            >>> class Projection(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.kernel = torch.nn.Parameter(torch.ones(4, 6))
            ...     def forward(self, x):
            ...         return x @ self.kernel
            >>> platform = get_platform("torch-cpu")
            >>> platform.register_linear_module(Projection, weight="kernel", bias=None, out_dim=1)
            >>> platform.is_linear_module(Projection())
            True
        """
        if not isinstance(cls, type):
            raise TypeError(f"register_linear_module takes a class of modules, got {cls!r}")
        if out_dim not in (0, 1):
            raise ValueError(f"out_dim is 0 for a weight of shape (out, in) and 1 for (in, out), got {out_dim!r}")
        self.linear_kinds[cls] = ModuleKind(weight, bias, out_dim)

    def register_embedding_module(self, cls: type, *, weight: str = "weight") -> None:
        """Let the styles treat ``cls`` as an embedding, which looks rows up in the attribute ``weight``. Raises
        TypeError when ``cls`` is no class."""
        if not isinstance(cls, type):
            raise TypeError(f"register_embedding_module takes a class of modules, got {cls!r}")
        self.embedding_kinds[cls] = ModuleKind(weight, None)

    def register_norm_module(self, cls: type, *, dims: int = 1) -> None:
        """Declare ``cls`` a norm over the last ``dims`` dimensions, for a fast path of `SequenceParallel`.

        Each position of the dimensions before them must be computed independently. Forward must read the parameters as
        attributes of the module. Subclasses of ``cls`` are not included. Raises TypeError when ``cls`` is no class,
        ValueError for a number of dimensions below 1.

        Example:
            >>> import torch
            >>> class ScaleNorm(torch.nn.Module):
            ...     def forward(self, x):
            ...         return x / x.norm(dim=-1, keepdim=True)
            >>> from hyper_parallel import get_platform
            >>> get_platform("torch-cpu").register_norm_module(ScaleNorm)
        """
        if not isinstance(cls, type):
            raise TypeError(f"register_norm_module takes a class of modules, got {cls!r}")
        if dims < 1:
            raise ValueError(f"a norm normalises at least 1 dimension, got dims={dims!r}")
        self.norm_kinds[cls] = lambda module: dims

    @abstractmethod
    def named_modules(self, root: Module) -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for ``root`` (path ``""``) and everything below it, parents first, each module once."""

    def named_parameters(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) for the parameters that ``module`` itself holds, children excluded, ties included."""
        return iter([(name, p) for name, p in self.own_parameters(module).items() if p is not None])

    @abstractmethod
    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) for the buffers that ``module`` itself holds, children excluded."""

    @abstractmethod
    def own_parameters(self, module: Module) -> MutableMapping[str, Tensor | None]:
        """Return the table of parameters that ``module`` itself holds, by name: the framework's own table. The table
        lacks parameters that a parametrization has replaced. A tensor that is written to the table replaces the
        parameter in the forward of ``module``. The tensor need not be a parameter."""

    @abstractmethod
    def set_buffer(self, module: Module, name: str, value: Tensor) -> None:
        """Replace a buffer."""

    @abstractmethod
    def set_distributed_parameter(self, module: Module, name: str, local: Tensor, layout: Layout) -> None:
        """Turn the parameter ``module.<name>`` into a distributed parameter with the local tensor ``local`` and
        ``layout``.

        Name and ``requires_grad`` stay. The parameter object stays too, where the framework allows it, so that live
        optimizers and tied modules keep seeing it. An already distributed parameter is replaced too.
        """

    def register_forward_pre_hook(
        self, module: Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook(module, args)`` before forward, or ``hook(module, args, kwargs)`` with ``with_kwargs``. The hook
        returns None, or the new args, or ``(args, kwargs)``. With ``prepend``, it runs before the existing hooks."""
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self, module: Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook(module, args, output)`` after forward (``hook(module, args, kwargs, output)`` with
        ``with_kwargs``). Its result, unless None, replaces the output. The default calls the method of the same name of
        ``module``."""
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def show_styles(self, module: Module) -> None:
        """Add the text of `platform.module_text.text_of_plan` to the representation of ``module``, as ``print`` shows
        it."""
        return

    @abstractmethod
    def replace_forward(self, module: Module, make: Callable[[Callable], Callable], mixin: type | None = None) -> None:
        """Let calls of ``module`` run ``make(forward)(module, *args, **kwargs)``. ``forward`` is the forward of its
        class, or the present replacement. Hooks run as before. A copy of the module runs the new forward on itself. The
        module stays an instance of its class, and becomes an instance of ``mixin``, which precedes it. A framework may
        move all parameters of the subtree to another dtype or device. The move runs inside the context that
        ``mixin._moving()`` returns, if ``mixin`` has that method."""


def _kind_of(module: Module, kinds: Mapping[type, ModuleKind]) -> ModuleKind | None:
    """Return the kind of the nearest class in the method resolution order of ``module``'s class."""
    return next((kinds[cls] for cls in type(module).__mro__ if cls in kinds), None)
