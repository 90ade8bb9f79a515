"""Steps of element-wise optimizers on the local tensors, as fast as on plain tensors.

Every optimizer is also correct without this module. Then each of its operations is intercepted, which takes longer.
Here ``step`` of the listed classes is wrapped (`platform.torch.patches`). While a step runs, parameters, gradients and
state are plain tensors: their class is changed, and changed back afterwards. These changes are cheap. With subclasses,
torch takes longer to recognise each argument of each kernel as a tensor. Closures, and hooks on optimizers, see
DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.private import is_or_disables
from hyper_parallel.platform.torch.basics.tensor import State, wrap
from hyper_parallel.platform.torch.op_table.binding import words

__all__ = ["COUNTERS", "ELEMENTWISE", "STORES", "clear_locally", "collect_locals", "local_step"]


ELEMENTWISE = words("SGD Adam Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD")
#: Optimizers whose step writes the tensors that ``_init_group`` looked up back into the state. So it must get those
#: tensors, not aliases.
STORES = ("SGD",)
#: Numbers that optimizers store for every parameter, whatever its shape.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
#: Attribute of an optimizer that holds its `_LocalStep`. Pickle and deepcopy of optimizers drop it.
_ATTRIBUTE = "_hyper_parallel_step"


def local_step(step: Any) -> Any:
    """Wrap ``step`` of an optimizer of `ELEMENTWISE`."""
    tensor_class = State.tensor_class
    # Once a class has an instance, torch has wrapped its step in profiling and hooks: these stay outside.
    is_hooked = getattr(step, "hooked", False)
    inner = step.__wrapped__ if is_hooked else step

    @functools.wraps(inner)
    def step_locally(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        distributed = [p for p in parameters if type(p) is tensor_class]
        if not distributed:
            return inner(self, closure)
        if closure is not None:
            # First, as in torch, because the closure needs parameters and gradients that are DTensors.
            with torch.enable_grad():
                loss = closure()
            closure = lambda: loss  # noqa: E731
        local = self.__dict__.get(_ATTRIBUTE)
        if local is None:
            local = self.__dict__[_ATTRIBUTE] = _LocalStep(tensor_class)
        if not local.suits(self, distributed):
            return inner(self, closure)
        State.core.before_writes(distributed)
        with no_dispatch():
            try:
                local.begin(distributed, len(parameters))
                result = inner(self, closure)
            finally:
                local.end(self)
        State.core.notice_writes(distributed)  # fused kernels count no writes
        return result

    return _hooked(step_locally) if is_hooked else step_locally


def _hooked(step: Any) -> Any:
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked


def clear_locally(zero_grad: Any) -> Any:
    """Wrap ``zero_grad`` of all optimizers, so that it works on local gradients."""
    tensor_class: Any = State.tensor_class
    local_classes = {tensor_class, tensor_class.__bases__[-1], torch.nn.Parameter}

    @functools.wraps(zero_grad)
    def zero_local_gradients(self: Any, set_to_none: bool = True) -> None:
        kinds = {type(p) for group in self.param_groups for p in group["params"]}
        if tensor_class in kinds and kinds <= local_classes:
            with no_dispatch():
                zero_grad(self, set_to_none)
                zeroed = () if set_to_none else [p.grad for group in self.param_groups for p in group["params"]]
            State.core.notice_writes(zeroed)
        else:
            zero_grad(self, set_to_none)

    return zero_local_gradients


def collect_locals(init_group: Any, aliases: bool) -> Any:
    """Wrap ``_init_group``, which fills lists with an optimizer's tensors for a parameter group.

    Args:
        init_group: torch's function. In all listed classes it only looks up the state once that exists.
        aliases: whether the lists may contain other tensors with the same data.
    """

    @functools.wraps(init_group)
    def init_group_of_locals(self: Any, group: Any, *lists: Any, **kwargs: Any) -> Any:
        local = self.__dict__.get(_ATTRIBUTE)
        if local is None or not local.running or kwargs or len(lists) < 2 or any(lists):
            return init_group(self, group, *lists, **kwargs)
        # A user's override may do more.
        is_known = is_or_disables(type(self)._init_group, init_group_of_locals)
        return local.collect(init_group, is_known, aliases, self, group, lists)

    init_group_of_locals.collects = True  # type: ignore[attr-defined]
    return init_group_of_locals


class _LocalStep:
    """Steps of one optimizer on local tensors.

    The object is kept between steps, so that unchanging facts are computed once.
    """

    def __init__(self, tensor_class: Any) -> None:
        self.tensor_class: Any = tensor_class
        #: Class of local tensors.
        self.plain_class: Any = tensor_class.__bases__[-1]
        #: Whether a step is in progress.
        self.running = False
        self.distributed: list[Any] = []
        #: Whether all parameters are distributed.
        self.complete = False
        #: Number of parameter groups whose state was complete and distributed.
        self.found = 0
        #: Layouts of the distributed parameters, none of them a partial sum.
        self.layouts: list[Any] = []
        #: ``id`` of the state that `_check_state` has checked. No reference: state may be large.
        self.looked_at = 0
        #: DTensors that are plain at present.
        self.swapped: list[list[Any]] = []
        #: ``id`` and number of entries of the state at the last check. No reference: state may be large.
        self.counted: tuple[int, int] = (0, -1)
        #: Results of `_remember`.
        self.columns: dict[tuple, tuple[Any, list[tuple[str | None, bool]]]] = {}

    def suits(self, optimizer: Any, distributed: list[Any]) -> bool:
        """Return whether the step may run on local tensors: it is not differentiable, and no parameter is a partial
        sum. Gradients must have the layouts of the parameters, at the latest after `collect`."""
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                return False
        if not getattr(getattr(optimizer, "_init_group", None), "collects", False):
            with no_dispatch():
                for p in distributed:
                    gradient = p.grad
                    if type(gradient) is self.tensor_class and gradient._layout is not p._layout:
                        return False
        layouts = [p._layout for p in distributed]
        if layouts != self.layouts and any(layout.cotangent is not layout for layout in layouts):
            return False
        if layouts != self.layouts or self.looked_at != id(optimizer.state):
            _check_state(optimizer, distributed, self.plain_class)
            self.layouts, self.looked_at = layouts, id(optimizer.state)
        return True

    def begin(self, distributed: list[Any], count: int) -> None:
        """Turn the DTensors among ``count`` parameters into plain tensors."""
        self.complete, self.found = len(distributed) == count, 0
        self.distributed, self.running = distributed, True
        self._make_plain(distributed)

    def end(self, optimizer: Any) -> None:
        """Turn parameters, gradients and state back into DTensors, including new state."""
        tensor_class, self.running = self.tensor_class, False
        for tensors in self.swapped:
            for x in tensors:
                x.__class__ = tensor_class
        self.swapped = []
        distributed, self.distributed = self.distributed, []
        if self.found == len(optimizer.param_groups):
            # The dict that was counted may be gone, and another may have its address.
            self.counted = (0, -1)
            return
        # A step writes its state in place. State is new if the number of entries changed, or if another state was
        # loaded.
        counted = (id(optimizer.state), _count(optimizer.state))
        if counted != self.counted or counted[1] < 0:
            _tag_state(optimizer.state, distributed, self.plain_class)
            self.counted = counted

    def collect(
        self, init_group: Any, is_known: bool, aliases: bool, optimizer: Any, group: dict[str, Any], lists: tuple
    ) -> Any:
        """Fill the lists with plain tensors. The first two lists are parameters and their gradients."""
        # Torch checks a learning rate that is a tensor in ``_init_group``.
        is_known = is_known and self.complete and not isinstance(group["lr"], Tensor)
        # Options that affect the lists in some optimizer.
        find = group.get
        options = (init_group, bool(find("amsgrad")), bool(find("momentum")), bool(find("centered")))
        known = self.columns.get(options) if is_known else None
        if known is not None and self._fill(known[1], aliases, optimizer.state, group, lists):
            result = known[0]
            self.found += aliases
        else:
            aliases, result = False, init_group(optimizer, group, *lists)
            if is_known:
                self._remember(options, result, optimizer.state, lists)
        self._make_gradients_plain(lists)
        if aliases:
            return result
        tensor_class = self.tensor_class
        for column in lists[2:]:
            tensors = [x for x in column if type(x) is tensor_class]
            if tensors:
                self._make_plain(tensors)
        return result

    def _make_plain(self, tensors: list[Any]) -> None:
        plain_class = self.plain_class
        # Noted first, so that it is undone whatever happens.
        self.swapped.append(tensors)
        for x in tensors:
            x.__class__ = plain_class

    def _make_gradients_plain(self, lists: tuple) -> None:
        """Redistribute the gradients of distributed parameters to the parameters' layouts. The layouts differ only if a
        parameter was given other data."""
        parameters, gradients, tensor_class = lists[0], lists[1], self.tensor_class
        kinds = set(map(type, gradients))
        if tensor_class not in kinds:
            # They were not read since backward, which left them with the right layouts.
            return
        # One group with a gradient for each parameter is the common case.
        if len(kinds) > 1 or [g._layout for g in gradients] != self.layouts:
            for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
                if type(g) is tensor_class and g._layout is not p._layout:
                    with torch._C._EnableTorchFunction():
                        gradients[i] = State.core.as_cotangent(g, p._layout, "a gradient")
            gradients = [g for g in gradients if type(g) is tensor_class]
        self._make_plain(list(gradients))

    def _remember(self, key: tuple, result: Any, state: Any, lists: tuple[list[Any], ...]) -> None:
        """Store which state each list contains, if each list contains one state of all parameters.

        This avoids checks that take half of the Python time of a fused step: is a parameter complex, its gradient
        sparse, its state missing? Gradients of distributed parameters are never sparse.
        """
        parameters, columns = lists[0], lists[2:]
        if not parameters or (any(result) if isinstance(result, tuple) else result):
            return
        states = [state[p] for p in parameters]
        names = [_name_of(column, states) if column else None for column in columns]
        distributed = [bool(column) and all(type(x) is self.tensor_class for x in column) for column in columns]
        for name, column, is_distributed in zip(names, columns, distributed, strict=True):
            # New state with the shape of its parameter will be distributed.
            if column and (name is None or (not is_distributed and any(x.dim() for x in column))):
                return
        self.columns[key] = (result, list(zip(names, distributed, strict=True)))

    def _fill(self, columns: list, aliases: bool, state: Any, group: dict[str, Any], lists: tuple) -> bool:
        """Fill the lists and return True, if all parameters have gradients and state and none is complex."""
        parameters = group["params"]
        gradients = [p.grad for p in parameters]
        # No fused kernel takes complex numbers.
        if type(None) in map(type, gradients) or (
            not group.get("fused") and True in map(Tensor.is_complex, parameters)
        ):
            return False
        if len(state) == len(parameters) and all(map(is_, state, parameters)):
            states = list(state.values())
        else:
            states = [state.get(p) for p in parameters] if state else []
        try:
            found = [self._column(states, name, aliases and distributed) for name, distributed in columns]
        except (KeyError, TypeError):
            return False
        for target, values in zip(lists, (parameters, gradients, *found), strict=True):
            target.extend(values)
        return True

    def _column(self, states: list[dict[str, Any]], name: str | None, aliases: bool) -> list[Any]:
        if name is None:
            return []
        if not aliases:
            return [own[name] for own in states]
        try:
            return [own[name]._plain for own in states]
        except AttributeError:
            return [self._plain(own[name]) for own in states]

    def _plain(self, x: Any) -> Any:
        """Return the plain tensor with the same data, cached on the DTensor."""
        if type(x) is not self.tensor_class:
            raise KeyError("the optimizer's state holds a plain tensor, which must be distributed first")
        # It shares data and version, and has no reference to the DTensor, so there is no cycle.
        x._plain = x.detach()
        return x._plain


def _check_state(optimizer: Any, parameters: list[Any], plain_class: Any) -> None:
    """Raise ValueError for state that was made before its parameter was sharded. Such state may differ between
    ranks."""
    for p in parameters:
        own = optimizer.state.get(p)
        layout = p._layout
        if not isinstance(own, dict) or all(
            placement.is_replicate() or size == 1
            for placement, size in zip(layout.placements, layout.mesh.shape, strict=True)
        ):
            continue
        for name, value in own.items():
            before = getattr(value, "_layout", None)
            # On another mesh: state of a tensor-parallel parameter that data parallelism has sharded further.
            if before is not None and before.mesh is not layout.mesh:
                shape = before.shape
            elif type(value) is plain_class and value.dim():
                shape = value.shape
            else:
                continue
            if tuple(layout.shape) == tuple(shape):
                raise ValueError(
                    f"{type(optimizer).__name__} has the state {name!r}, of shape {tuple(layout.shape)}, but its "
                    f"parameter is distributed, as {list(layout.placements)}. Either the parameter was distributed "
                    "after the first step, or an unsharded state was loaded. Make the optimizer after "
                    "parallelize_module and fully_shard. Load unsharded states with set_optimizer_state_dict and "
                    "full_state_dict=True. Or distribute a state that is equal on all ranks: state[name] = "
                    "distribute_tensor(state[name], p.device_mesh, p.placements) for p, state in "
                    "optimizer.state.items()"
                )


def _name_of(column: list[Any], states: list[dict[str, Any]]) -> str | None:
    """Return the name of the state that ``column`` lists for all parameters; None if it lists no such state."""
    for name in states[0]:
        if column[0] is not None and all(s.get(name) is x for s, x in zip(states, column, strict=True)):
            return name
    return None


def _count(state: Any) -> int:
    try:
        return sum(map(len, state.values()))
    except TypeError:  # entries of a user-defined optimizer
        return -1


def _tag_state(state: Any, parameters: list[Any], plain_class: Any) -> None:
    """Distribute each state in the same way as its parameter, if both have one shape. Interception is off."""
    for p in parameters:
        own = state.get(p)
        if isinstance(own, dict):
            for name, value in own.items():
                if type(value) is plain_class and value.shape == p.shape and (value.dim() or name not in COUNTERS):
                    wrap(value, p._layout)
