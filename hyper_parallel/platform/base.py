"""The contract between ``hyper_parallel.core`` and a backend.

A backend is one subclass of `Platform`. Core calls nothing of a framework but the verbs declared here, and a verb
that core does not call is not here. What a backend must bring:

* **types and checks** - what a tensor, a parameter, a module is; which modules are linear or embedding layers;
* **modules** - walking and changing a module tree, forward hooks;
* **process groups and collectives** - on plain local tensors, outside autograd; a verb that the backend lacks is
  reported by `supports` and emulated once, in `core.dtensor.collectives`;
* **autograd** - one way to define a function with a forward and a backward;
* **interception** - a tensor class whose operations arrive at `dispatch`, a guard that turns that off, and the
  table that maps native operations to the canonical ones of `core.dtensor.rules`;
* **local tensor operations** - the few that redistribution itself needs;
* **random numbers**.

`hyper_parallel.platform.torch.base` and `hyper_parallel.platform.mindspore.base` are the two to learn from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

__all__ = ["Dispatch", "ModuleKind", "NativeOp", "Platform", "kept_view"]

Tensor = Any
Module = Any
Group = Any
Layout = Any


@dataclass(frozen=True, eq=False)
class NativeOp:
    """One row of a backend's op table: how a native operation maps to a canonical one.

    Attributes:
        name: the canonical operation, a key of `core.dtensor.rules` (``"linear"``, ``"pointwise"``, ...).
        bind: ``bind(func, args, kwargs) -> (operands, statics)`` brings a native call into canonical form.
            ``operands`` is the tuple of tensor operands (tensors, Python scalars or ``None``), ``statics`` the tuple
            of the remaining arguments in the order that the canonical operation documents; it must be hashable.
            For element-wise operations ``statics`` may be any object: it is handed to `call` and never looked at.
        call: ``call(func, operands, statics) -> result`` runs the native operation on local tensors. The result is
            a tensor or a tuple or list of tensors.
        binds_by_function: whether `bind` may look at ``func``. False where it does not, as it must be where a
            framework makes a new function object for each call: calls are remembered under the function otherwise.
        memory: what the result does with the memory of the first operand, where that does not follow from the canonical
            operation: ``"shared"`` for a view, ``"viewable"`` for a view where strides allow it, else a copy,
            ``"contiguous"`` for the operand itself if it is contiguous, else a copy, ``"copied"`` for a copy always,
            of an operation that gives views elsewhere.
        varies: ``varies()`` is whether a mode of the framework, such as autocast, has a say in what `bind` returns now:
            then a call is not remembered. None where none ever has.
    """

    name: str
    bind: Callable[[Any, tuple, dict], tuple[tuple, Any]]
    call: Callable[[Any, tuple, Any], Any]
    binds_by_function: bool = True
    varies: Callable[[], bool] | None = None
    memory: str = ""


class Dispatch(Protocol):
    """Core's dispatcher, which runs native operations of which some argument is a DTensor."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``, of which ``op`` is the row of the op table, None when it has none."""

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """The same for one row, as ``run(func, args, kwargs)``."""


def kept_view(platform: Any, make: Callable[[Tensor], Tensor], key: Any) -> Callable[..., Tensor]:
    """``view(x)``: ``x`` itself where it requires no gradient, else ``make(x)``, the same each time under the
    conditions of `Platform.read_cache`; it is kept there under ``key``. Further arguments of ``view`` are ignored."""
    requires_grad, read, write = platform.requires_grad, platform.read_cache, platform.write_cache

    def view(x: Tensor, *_: Any) -> Tensor:
        if not requires_grad(x):
            return x
        found = read(x, key)
        if found is None:
            found = make(x)
            write(x, key, found)
        return found

    return view


@dataclass(frozen=True)
class ModuleKind:
    """Where the modules of one class keep what the styles shard.

    Attributes:
        weight: attribute of the weight.
        bias: attribute of the bias, which may be absent or None on a module; None for a class without one.
        out_dim: dimension of a linear layer's weight that holds the output features: 0 for (out, in), 1 for (in, out).
    """

    weight: str = "weight"
    bias: str | None = "bias"
    out_dim: int = 0


class Platform(ABC):
    """What core asks of a backend. Instances are singletons; get one with `hyper_parallel.platform.get_platform`."""

    #: Name in the registry and in ``HYPER_PARALLEL_PLATFORM``, for example ``"torch-cpu"``.
    name: ClassVar[str]
    #: Device type that a `DeviceMesh` on this platform has: ``"cpu"``, ``"cuda"``, ``"npu"``.
    device_type: ClassVar[str]
    #: Default communication backend, for example ``"gloo"``.
    comm_backend: ClassVar[str]
    #: Whether `linear_with_collective` is asked for native operations outside `overlap_collectives` too.
    fuses_linear: bool = False
    #: Whether the framework's largest and smallest element of some with NaN among them is NaN, wherever that stands.
    extremes_keep_nan: bool = True
    #: Whether every draw of a native operation changes what `get_rng_state` gives, which is a tensor then, so that core
    #: can see that an operation has drawn.
    watches_draws: bool = False

    # ---------------------------------------------------------------- types and checks
    #: The framework's tensor, parameter, module and shape classes. ``Size`` is a tuple or a subclass of it.
    Tensor: Any
    Parameter: Any
    Module: Any
    Size: Any
    #: Classes of linear and embedding layers, with where they keep their parameters; subclasses count too.
    linear_kinds: ClassVar[dict[type, ModuleKind]]
    embedding_kinds: ClassVar[dict[type, ModuleKind]]
    #: class -> how many of the last dimensions one of its modules normalises, None where that is not known.
    norm_kinds: ClassVar[dict[type, Callable[[Module], int | None]]] = {}

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this backend cannot run here, as a sentence for a person, or None when it can. Imports as little as
        is needed to know."""

    @abstractmethod
    def is_tensor(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of the framework (distributed ones included)."""

    def foreign_tensor(self, x: Any) -> str | None:
        """What ``x`` is, for messages ("a tensor of the class ..., of torch.distributed.tensor"), and what to do about
        it, if it is a tensor of the framework that cannot be, or meet, the local part of a DTensor: of a class that
        computes in its own way, or stored in another way than as one dense array. None for all other values."""
        return None

    def is_linear_module(self, module: Module) -> bool:
        """Whether ``module`` computes ``x @ weight.T + bias``, or ``x @ weight + bias`` where its kind says so."""
        return _kind_of(module, self.linear_kinds) is not None

    def is_embedding_module(self, module: Module) -> bool:
        """Whether ``module`` looks rows up in a weight of shape (num_embeddings, embedding_dim)."""
        return _kind_of(module, self.embedding_kinds) is not None

    def normalized_dims(self, module: Module) -> int | None:
        """How many of the last dimensions ``module`` normalises, if it is a norm of an exactly known class: of the
        framework, or registered. None for any other module."""
        dims = self.norm_kinds.get(type(module))
        return None if dims is None else dims(module)

    def norm_call(self, module: Module) -> Callable[[Module, Tensor, Mapping[str, Tensor | None]], Tensor] | None:
        """``call(module, x, parameters)``: the forward of a norm of the framework's own class with these parameters in
        place of its own, where that costs less than calling the module. None where it does not."""
        return None

    def register_norm_module(self, cls: type, *, dims: int = 1) -> None:
        """Let `SequenceParallel` treat ``cls`` as a norm over the last ``dims`` dimensions, which costs less.

        Each position of the dimensions before them must be computed alone, and the parameters be read as attributes of
        the module. Classes derived from ``cls`` are not meant.

        Raises:
            TypeError: when ``cls`` is no class. ValueError: for a number of dimensions below 1.

        Example:
            >>> import torch
            >>> from hyper_parallel import get_platform
            >>> class ScaleNorm(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.scale = torch.nn.Parameter(torch.ones(()))
            ...     def forward(self, x):
            ...         return self.scale * x / x.norm(dim=-1, keepdim=True)
            >>> get_platform("torch-cpu").register_norm_module(ScaleNorm)
        """
        if not isinstance(cls, type):
            raise TypeError(f"register_norm_module takes a class of modules, got {cls!r}")
        if dims < 1:
            raise ValueError(f"a norm normalises at least 1 dimension, got dims={dims!r}")
        self.norm_kinds[cls] = lambda module: dims

    @abstractmethod
    def is_plain_linear(self, module: Module) -> bool:
        """Whether a call of ``module`` is `linear` of its input, its weight and its bias and nothing else: of the
        framework's own class, not of one derived from it, and without an activation."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` on plain local tensors. Differentiable."""

    def is_plain_embedding(self, module: Module) -> bool:
        """Whether a call of ``module`` is `embedding` of its input and its weight and nothing else: of the framework's
        own class, and without a row for padding, limits to norms or other treatment of gradients. A backend that
        answers False has its embeddings dispatched."""
        return False

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """The rows ``ids`` of ``weight``, on plain local tensors. Differentiable. For `is_plain_embedding`."""
        raise TypeError(f"the platform {self.name!r} has no plain embeddings")

    def linear_with_collective(
        self,
        collective: str,
        x: Tensor,
        weight: Tensor,
        group: Group,
        size: int,
        dim: int,
        announce: Callable[[str, Tensor], None],
        chunks: int = 1,
    ) -> Tensor | None:
        """`linear` without bias and a collective that overlap, or None, having done nothing, where the backend cannot
        overlap them for these operands. Differentiable in ``x`` and ``weight``. A native operation does both where
        `fuses_linear` is set; otherwise both are cut into ``chunks``, fewer where that number does not divide, if that
        is more than one.

        ``"all_reduce"``: the sum over the ranks of ``x @ weight.T``, whose cotangent is the same on all of them.
        ``"reduce_scatter"``: this rank's part of that sum along dimension ``dim`` of ``x``, not the last.
        ``"all_gather"``: ``x`` of all ranks, one after the other along ``dim``, times ``weight.T``; backward sums the
        gradient of ``x`` over the ranks and gives each its part.

        All ranks must get the same answer, so core asks only where their operands have the same shapes. ``announce``
        is called with the name and the operand of each collective, in backward too, right before it.
        """
        return None

    def kind_of(self, module: Module) -> ModuleKind:
        """Where a linear or embedding module keeps its parameters.

        Raises:
            TypeError: for another module.
        """
        kind = _kind_of(module, self.linear_kinds) or _kind_of(module, self.embedding_kinds)
        if kind is None:
            raise TypeError(f"{type(module).__name__} is no linear or embedding module")
        return kind

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
        """Let the styles treat ``cls`` as an embedding, which looks rows up in the attribute ``weight``.

        Raises:
            TypeError: when ``cls`` is no class.
        """
        if not isinstance(cls, type):
            raise TypeError(f"register_embedding_module takes a class of modules, got {cls!r}")
        self.embedding_kinds[cls] = ModuleKind(weight, None)

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool:
        """Whether an operation on ``x`` right now can carry a gradient back to it: False when gradients are switched
        off. A backend that cannot know answers True."""

    @abstractmethod
    def is_floating_point(self, x: Tensor) -> bool:
        """Whether ``x`` has a floating point dtype."""

    @abstractmethod
    def is_meta(self, x: Tensor) -> bool:
        """Whether ``x`` has a shape and dtype but no data."""

    def has_values(self, x: Tensor) -> bool:
        """Whether the values of a plain tensor can be read with `bytes_of` and replaced with `write`: not where there
        are none (`is_meta`), nor in a format other than the usual one. Decided from what all ranks share."""
        return not self.is_meta(x)

    @abstractmethod
    def bytes_of(self, x: Tensor) -> bytes:
        """The values of a plain local tensor on any device, in row-major order."""

    @abstractmethod
    def write(self, x: Tensor, values: Tensor) -> None:
        """Replace the values of a plain parameter or buffer by those of a plain tensor of its shape and dtype. It stays
        the same object, on its device. Called without gradients."""

    def watch(self, x: Tensor, operation: str) -> Callable[[], str]:
        """``how()``, which says how the native ``operation`` has written to a plain tensor since: ``""`` for not,
        ``"recorded"`` for a change that gradients pass through, else ``"values"``. Unless a framework counts writes, it
        is found out by comparing values."""
        before = self.bytes_of(self.detach(x))
        return lambda: "" if self.bytes_of(self.detach(x)) == before else "values"

    @abstractmethod
    def shape_of(self, local: Tensor) -> tuple[int, ...]:
        """Shape of a tensor as the framework holds it: of a DTensor, the local shape."""

    # ---------------------------------------------------------------- modules
    @abstractmethod
    def named_modules(self, root: Module) -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for ``root`` (path ``""``) and everything below it, parents first, each module once."""

    @abstractmethod
    def named_parameters(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) for the parameters that ``module`` itself holds, children excluded, ties included."""

    @abstractmethod
    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) for the buffers that ``module`` itself holds, children excluded."""

    @abstractmethod
    def set_buffer(self, module: Module, name: str, value: Tensor) -> None:
        """Replace a buffer."""

    @abstractmethod
    def set_distributed_parameter(self, module: Module, name: str, local: Tensor, layout: Layout) -> None:
        """Turn the parameter ``module.<name>`` into a distributed one that holds ``local`` and has ``layout``.

        Name, ``requires_grad`` and, where the framework allows it, the identity of the parameter object stay, so that
        live optimizers and tied modules keep seeing it. A parameter that already is distributed is replaced too.
        """

    @abstractmethod
    def register_forward_pre_hook(
        self, module: Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook(module, args)`` before forward, or with ``with_kwargs`` ``hook(module, args, kwargs)``, which
        returns None, or the new args, or ``(args, kwargs)``. ``prepend`` puts it before the hooks that are there."""

    @abstractmethod
    def register_forward_hook(
        self, module: Module, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook(module, args, output)`` after forward (``hook(module, args, kwargs, output)`` with
        ``with_kwargs``); what it returns, unless None, replaces the output."""

    @abstractmethod
    def replace_forward(self, module: Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let calls of ``module`` run ``make(forward)(module, *args, **kwargs)`` in place of ``forward(module, *args,
        **kwargs)``, the forward of its class. Hooks run around it as before. A copy of the module runs it on itself,
        and the module stays an instance of its class."""

    @abstractmethod
    def own_parameters(self, module: Module) -> Mapping[str, Tensor | None]:
        """The parameters that ``module`` itself holds, by name, without looking further: a table that is there
        already. What something else has taken the place of (a parametrization) is missing."""

    # ---------------------------------------------------------------- process groups
    @abstractmethod
    def world(self) -> Any:
        """An object that stands for the initialised default process group, a new one after each initialisation;
        None before. Core holds it weakly and compares by identity."""

    @abstractmethod
    def init_process_group(self, timeout: float | None = None) -> None:
        """Initialise the default group from the launcher's environment (torchrun's ``RANK``, ``WORLD_SIZE``,
        ``MASTER_ADDR``, ``MASTER_PORT`` or msrun's ``MS_*``), and select this rank's device. Without a launcher: a
        world of one rank. Does nothing when there is a default group already.

        ``timeout`` is how many seconds ranks wait for each other, when they meet and in each collective of this and
        of all other groups, before they raise; None is the environment variable ``HYPER_PARALLEL_TIMEOUT``, or
        where that is not set, the framework's own. See `hyper_parallel.platform.timeout.timeout_seconds`.
        """

    @abstractmethod
    def destroy_process_group(self) -> None:
        """Tear the default group and all others down. For programs; core does not call it."""

    @abstractmethod
    def rank(self) -> int:
        """Rank in the default group."""

    @abstractmethod
    def world_size(self) -> int:
        """Size of the default group."""

    @abstractmethod
    def new_group(self, rank_lists: Sequence[Sequence[int]]) -> Group:
        """Make one group for each list of ranks and return the one that this rank is in, None if in none. Called with
        the same lists on every rank of the world. A list of all ranks may give the default group."""

    @abstractmethod
    def native_group(self, group: Group) -> Any:
        """What the framework's own functions take for ``group``: for users who call them on ``mesh.get_group()``."""

    # ---------------------------------------------------------------- collectives on plain local tensors, no autograd
    @abstractmethod
    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Whether the verb ``collective`` (``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``,
        ``"broadcast"``, ``"scatter"``) takes the dtype of ``local`` and, for reductions, the op ``op`` (``"sum"``,
        ``"avg"``, ``"max"``, ``"min"``, ``"product"``). Core emulates what is not supported."""

    @abstractmethod
    def all_reduce(self, local: Tensor, op: str, group: Group) -> Tensor:
        """Reduce over the group. ``local`` is contiguous and may be overwritten; the result is returned."""

    @abstractmethod
    def all_gather(self, local: Tensor, group: Group, size: int) -> Tensor:
        """``local`` (s0, ...) contiguous, the same shape on all ``size`` ranks -> (size * s0, ...)."""

    @abstractmethod
    def reduce_scatter(self, local: Tensor, op: str, group: Group, size: int) -> Tensor:
        """``local`` (size * s0, ...) contiguous -> (s0, ...): the reduction of part `rank` of every rank's tensor."""

    @abstractmethod
    def all_to_all(self, local: Tensor, group: Group, size: int) -> Tensor:
        """``local`` (size * s0, ...) contiguous -> the same shape: part i goes to rank i, part j comes from rank j."""

    @abstractmethod
    def broadcast(self, local: Tensor, src: int, group: Group) -> Tensor:
        """Value of global rank ``src`` on every rank of the group. ``local`` is contiguous and may be overwritten."""

    @abstractmethod
    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int, group: Group) -> Tensor:
        """Fill contiguous ``out`` with this rank's part of ``parts``, which global rank ``src`` gives; the parts are
        contiguous and have one shape."""

    @abstractmethod
    def barrier(self, group: Group) -> None:
        """Wait for all ranks of the group. For programs; core does not call it."""

    @abstractmethod
    def all_gather_object(self, value: Any, group: Group, size: int) -> list[Any]:
        """One picklable value of each rank, in rank order. Off the hot path."""

    # ---------------------------------------------------------------- when a rank is lost
    def is_communication_failure(self, error: Exception) -> bool:
        """Whether a collective raised ``error`` because a rank did not do its part: it died, hangs or does something
        else. Such an error reaches the user as a `CollectiveError`. A backend that cannot tell answers False, and its
        own errors reach the user as they are."""
        return False

    def roll_call(
        self, group: Group, ranks: Sequence[int], report: str
    ) -> tuple[dict[int, str], tuple[int, ...]] | None:
        """Find out who is missing after a collective on ``group`` failed.

        Make the ranks fail that wait in the group, leave ``report`` for the other ranks of the world, and wait a few
        seconds for theirs. Returned are reports by rank, and the ranks that did not fail in this group; of those, a
        report tells where else they failed. The group may be unusable afterwards. Never raises; None where ranks have
        no way to find out.

        Args:
            group: of the failed collective.
            ranks: global ranks of the group.
            report: what this rank was doing.
        """
        return None

    def tell_of_failure(self, groups: Sequence[Group], ranks: Sequence[int], report: str) -> None:
        """Tell ``ranks`` that this one has failed outside a collective, and does not come to the next one.

        Wait a few seconds for all of them to call this too: then they have failed alike, and nothing is to be done.
        Otherwise leave ``report`` where `roll_call` finds it, and make the ranks fail that wait in ``groups``, which
        may be unusable afterwards. Never raises. A backend that cannot do so does nothing: the others wait for the
        time-out.

        Args:
            groups: those through which ``ranks`` communicate.
            ranks: global ranks, the same on all of them.
            report: what this rank was doing, and what it raised.
        """
        return None

    # ---------------------------------------------------------------- autograd
    @abstractmethod
    def autograd_function(
        self, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Make a differentiable ``apply(x, *static)`` of one differentiable operand.

        ``forward(ctx, x, *static)`` runs outside autograd and returns a tensor that is not ``x`` itself (a view of it
        is fine; the platform takes care that autograd does not treat it as one). ``backward(ctx, cotangent)`` returns
        the cotangent of ``x`` and is itself recorded when gradients of gradients are asked for. ``ctx`` takes
        attributes; a tensor that backward needs goes through ``ctx.save_for_backward(...)`` and comes back as
        ``ctx.saved_tensors``. Interception is off in both.
        """

    def autograd_step(
        self, forward: Callable[[Any, Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """`autograd_function` as ``apply(x)``, for what keeps nothing for backward and is called often.

        ``forward(ctx, x)`` has no use for ``ctx`` and returns a new tensor, no view. ``apply`` is called with
        interception off.
        """
        return self.autograd_function(forward, lambda ctx, cotangent: backward(cotangent))

    def autograd_pair(
        self, forward: Callable[[Any, Tensor], tuple[Tensor, Tensor]], backward: Callable[[Any, Any], Tensor]
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """As `autograd_step`, with two results, of an ``x`` that requires a gradient. ``backward(first, second)`` gets
        None for the cotangent of a result that nothing was computed from. None where a framework cannot tell."""
        return None

    def gradient_view(self, convert: Callable[[Tensor, Tensor], Tensor], key: Any) -> Callable[[Tensor], Tensor]:
        """``view(x)``: the data of ``x``, not to be written to; its cotangent reaches ``x`` as
        ``convert(x, cotangent)``. ``x`` itself where it requires no gradient, and the same view each time under the
        conditions of `read_cache`; it is kept there under ``key``. ``convert`` is recorded when gradients of gradients
        are asked for. Called with interception off, as the view is used."""

        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x
            return self.detach(x)

        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return convert(ctx.x, cotangent)

        return kept_view(self, self.autograd_function(forward, backward), key)

    def can_delay_gradient(self, parameter: Tensor) -> bool:
        """Asked inside backward: whether `add_to_gradient` after it is as good as returning the cotangent, because
        nothing but the accumulated gradient depends on it. A framework that returns gradients answers False."""
        return False

    def add_to_gradient(self, parameter: Tensor, cotangent: Tensor) -> None:
        """Add a plain tensor to the gradient that ``parameter`` has; after `can_delay_gradient` said yes."""
        raise TypeError(f"the platform {self.name!r} does not accumulate gradients in parameters")

    def linear_view(
        self,
        convert: Callable[[Tensor], Tensor],
        record: Callable[[Tensor], Tensor],
        key: Any,
        otherwise: Callable[[Tensor], Tensor],
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """``view(x, weight)``: the data of ``x`` for ``linear(view, weight, bias)`` alone; its cotangent reaches ``x``
        as ``convert(cotangent)``, which may overwrite it; where gradients of gradients are asked for as
        ``record(cotangent)``, which is differentiable. ``x`` itself where it requires no gradient, and the same view
        each time that ``x`` comes, under the conditions of `read_cache`; it is kept there under ``key``.

        A framework that has something cheaper for this than `autograd_function` brings it. The view has the shape of
        ``x``, or is 2-D: its leading dimensions as one. The operation must keep it until its backward; where it would
        not, ``otherwise(x)`` takes its place. Called with interception off.
        """
        return None

    def overwriting(
        self, write: Callable[[Tensor], Tensor], record: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor] | None:
        """``apply(y)``: ``y`` with the values that ``write(data)`` returns outside autograd, which may overwrite the
        data. The cotangent is left as it is; where gradients of gradients are asked for it is ``record(cotangent)``.

        For a new ``y`` whose operation does not need its value in backward: it stands for what was written, without a
        node in the graph. None where a framework has no hooks for that. Called with interception off.
        """
        return None

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """A plain tensor with the data of ``x`` and no gradient."""

    @abstractmethod
    def alias(self, x: Tensor) -> Tensor:
        """A new plain tensor object with the data of ``x``, differentiable with respect to ``x``."""

    @abstractmethod
    def same_memory(self, x: Tensor, y: Tensor) -> bool:
        """Whether ``y``, which has elements, lies in the storage that ``x`` lies in. Called with interception off."""

    @abstractmethod
    def no_grad(self) -> AbstractContextManager:
        """Context manager without gradients."""

    @abstractmethod
    def read_cache(self, holder: Tensor, key: Any) -> Tensor | None:
        """The tensor stored on ``holder`` with `write_cache` under ``key``, if it is still valid: the same gradient
        recording, and ``holder`` neither changed in place nor given other data since. Otherwise None. Called with
        interception off."""

    @abstractmethod
    def write_cache(self, holder: Tensor, key: Any, value: Tensor) -> None:
        """Keep ``value``, which has the data of ``holder``, for `read_cache`, without keeping either alive for longer
        than it would be. A backend that cannot do so safely for this ``holder`` stores nothing. Called with
        interception off."""

    @abstractmethod
    def clear_cache(self, holder: Tensor) -> None:
        """Drop all that `write_cache` stored on ``holder``."""

    # ---------------------------------------------------------------- interception
    @abstractmethod
    def make_dtensor_class(self, mixin: type, dispatch: Dispatch) -> type:
        """The DTensor class of this platform: a subclass of ``mixin`` (core's public methods) and of ``Tensor`` with
        the global shape as its shape. Every native operation on an instance arrives at ``dispatch``. Called once."""

    @abstractmethod
    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """Make a DTensor of a plain tensor that nobody else holds. Its ``_layout`` is ``layout``.

        Under `no_dispatch` the DTensor is its local tensor, part of the autograd graph: operations on it compute on the
        local data, and gradients land on it. So changing the class of ``local`` is the natural way.
        """

    @abstractmethod
    def no_dispatch(self) -> AbstractContextManager:
        """Guard under which operations on DTensors run on their local tensors and are not intercepted."""

    # ---------------------------------------------------------------- operations on plain local tensors
    @abstractmethod
    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """Slice ``x`` along ``dim``; differentiable."""

    @abstractmethod
    def chunk(self, x: Tensor, count: int, dim: int) -> Sequence[Tensor]:
        """The ``count`` equal parts of ``x`` along ``dim``, whose size ``count`` divides. Views where possible."""

    @abstractmethod
    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate along ``dim``; differentiable."""

    @abstractmethod
    def contiguous(self, x: Tensor) -> Tensor:
        """``x``, dense and in row-major order; ``x`` itself if it is so already. Differentiable."""

    @abstractmethod
    def clone(self, x: Tensor) -> Tensor:
        """A contiguous copy. Differentiable."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Zeros with dtype and device of ``like``."""

    @abstractmethod
    def ones(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Ones with dtype and device of ``like``."""

    def ones_in_memory(self, shape: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
        """`ones` with the given strides, of a dense tensor. For frameworks that draw a tensor's random numbers in the
        order of its elements in memory; the others draw in row-major order, whatever the strides."""
        return self.ones(shape, like)

    @abstractmethod
    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Strides of a local tensor, in elements. Called with interception off."""

    @abstractmethod
    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """``value`` where ``mask`` (broadcast to ``x``), else ``x``. Differentiable."""

    @abstractmethod
    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """Add a dimension of size 1. Differentiable."""

    @abstractmethod
    def to_dtype(self, x: Tensor, dtype: Any) -> Tensor:
        """``x`` converted to the dtype of the framework, or ``x`` itself. Differentiable."""

    @abstractmethod
    def amax(self, x: Tensor, dim: int) -> Tensor:
        """The largest along ``dim``, which has elements and keeps size 1; in float32 where ``x`` is narrower."""

    @abstractmethod
    def sum_along(self, x: Tensor, dim: int) -> Tensor:
        """The sum along ``dim``, which keeps size 1. Of no elements: zeros that lead back to ``x``. Differentiable."""

    @abstractmethod
    def shifted_exp(self, x: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        """``exp(x - shift) / scale``, of the shape of ``x``, in the wider of the dtypes. Called where nothing is
        recorded, so it may compute in place."""

    @abstractmethod
    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm. Differentiable."""

    @abstractmethod
    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Of ``x`` along ``dim`` the elements at ``index``, which has size 1 there and otherwise the shape of ``x``.
        Differentiable."""

    @abstractmethod
    def scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """``x``, which may be overwritten, with ``source`` added where `gather` would read. Differentiable."""

    # ---------------------------------------------------------------- devices and random numbers
    @abstractmethod
    def to_device(self, x: Tensor) -> Tensor:
        """``x`` on this rank's device of this platform, or ``x`` itself."""

    @abstractmethod
    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        """A new plain local tensor on this rank's device: ``name`` is ``"zeros"``, ``"ones"``, ``"empty"``,
        ``"full"`` (with ``fill_value``), ``"rand"`` or ``"randn"``. ``dtype`` None is the framework's default."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the framework's default generator on this rank's device."""

    @abstractmethod
    def get_rng_state(self) -> Any:
        """State of the default generator of this rank's device, picklable."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Put a state from `get_rng_state` back."""

    def why_no_rule(self, function: Any) -> str | None:
        """Why `register_sharding` cannot give a native operation that has no row a rule: the backend serves it before
        dispatch, or calls another in its place. None where it can."""
        return None

    @property
    @abstractmethod
    def op_table(self) -> Mapping[Any, NativeOp]:
        """Native operation (function object or name) -> `NativeOp`."""


def _kind_of(module: Module, kinds: Mapping[type, ModuleKind]) -> ModuleKind | None:
    """The kind of the nearest class that ``module`` is an instance of."""
    return next((kinds[cls] for cls in type(module).__mro__ if cls in kinds), None)
