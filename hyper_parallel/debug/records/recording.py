"""`record`: write the tensors that a model computes, module by module, into files."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.layouts.placement_types import Placement, Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.debug.records.files import Call, Writer
from hyper_parallel.debug.records.parts import Parts, numbers_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["record"]


class record:
    """Context manager that records the tensors that a model computes inside it, as files in a folder. `hyper-parallel
    compare` reads them.

    It writes outputs of modules in the order of calls, inputs that no module computed, and the gradients of both.
    Parameters are written at the start, and buffers in each step. Gradients and updates of parameters are written at
    the end of a step. Each rank writes its local part. Nothing is communicated, and no number of the program changes. A
    forward that backward recomputes is not recorded. Ranks without a shared disk need their files copied into one
    folder.

    A step ends with the optimizer's step, with a call of `step`, or with the context.

    Args:
        path: path of the folder. Files of an earlier record in it are replaced.
        model: the model whose modules are recorded. Without it, all called modules are recorded: the first outermost
            one has the empty path, and other outermost ones are named after their class.
        largest: maximum number of elements of a tensor that is written in full. Of larger tensors only samples and
            digests are written. None sets no limit.

    Raises:
        ValueError: for a number below 1. TypeError: where ``model`` is no module of the framework.

    Example:
        >>> import tempfile, torch
        >>> from hyper_parallel.debug import compare, record
        >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
        >>> for name in ("a", "b"):
        ...     model.zero_grad()
        ...     with record(f"{folder}/{name}", model):
        ...         model(torch.ones(3, 4)).sum().backward()
        >>> compare(f"{folder}/a", f"{folder}/b").departs
        False
    """

    def __init__(self, path: str | Path, model: Any = None, *, largest: int | None = 1 << 16) -> None:
        if largest is not None and (isinstance(largest, bool) or not isinstance(largest, int) or largest < 1):
            raise ValueError(f"largest takes a number of elements, at least 1, or None for no limit, got {largest!r}")
        self._path, self._model, self._largest = path, model, largest

    def __enter__(self) -> record:
        platform = self._platform = get_platform()
        if self._model is not None and not isinstance(self._model, platform.Module):
            raise TypeError(
                f"record(path, model) takes a module of the platform {platform.name!r}, got a "
                f"{type(self._model).__name__}: pass a module, or leave the model out"
            )
        world = platform.world() is not None
        self._rank, self._ranks = (platform.rank(), platform.world_size()) if world else (0, 1)
        self._largest_kept = (1 << 62) if self._largest is None else self._largest
        self._parts = Parts(platform, Writer(self._path, self._rank, self._ranks), self._largest_kept)
        self._writer = self._parts._writer
        self._calls: list[Call] = []
        self._step, self._begun, self._updated, self._live = 0, False, False, True
        self._paths: dict[int, str] = {}
        self._named: set[str] = set()
        self._optimizers: set[str] = set()
        self._roots: list[tuple[str, Any]] = []
        self._open: list[tuple[Any, int]] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._tensors: dict[int, tuple[Any, int]] = {}
        self._tensor_count, self._found_late = 0, -1
        self._before: dict[str, np.ndarray] = {}
        self._handles: list[Any] = []
        self._stack = ExitStack()
        self._stack.enter_context(platform.watch_steps(self, calls=self._model is None))
        if self._model is not None:
            self._attach(self._model)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._begun and exc_info[0] is None:
            self.step()
        self._stack.close()
        for handle in self._handles:
            handle.remove()
        root = self._parts.root
        index = {
            "ranks": self._ranks,
            "platform": self._platform.name,
            "largest": self._largest_kept,
            "root": None if root is None else vars(root),
            "notes": list(self._parts.notes),
        }
        self._writer.close(index, self._calls, self._parts.entries, self._parts.places)
        self._live = False
        self._tensors.clear()
        self._before.clear()

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """End a training step, for programs without an optimizer of the framework.

        Args:
            gradients: gradients of parameters, by their names in checkpoints, if the framework returns gradients.
        """
        if not self._updated:
            for name, p in self._parameters():
                g = self._gradient_on(p) if gradients is None else gradients.get(name)
                if g is not None:
                    self._add(("parameter gradient", self._step, name, 0, "", ""), g, like=p)
        self._step += 1
        self._begun = self._updated = False
        self._numbers.clear()
        self._tensors.clear()

    # ------------------------------------------------------------------------------------------------- the program
    def called(self, module: Any) -> None:
        """Register hooks on an outermost module when it is called, unless a model was given. Implements
        `StepWatcher.called`."""
        unknown = self._model is None and not self._open and id(module) not in self._paths
        if unknown and not self._platform.in_backward():
            self._attach(module)
            # Some frameworks do not run hooks that are registered while the module is called. Then the inputs are
            # recorded at the end.
            self._found_late = self._begin(module)

    def steps(self, optimizer: Any, gradients: Any) -> None:
        """Record gradients before an optimizer's step. Implements `StepWatcher.steps`."""
        with self._platform.no_dispatch():
            names = {id(p): name for name, p in self._parameters()}
            held = [p for group in self._platform.optimizer_state(optimizer).parameters for p in group]
            given = list(map(self._gradient_on, held) if gradients is None else gradients)
            for p, g in zip(held, given, strict=False):
                name = names.get(id(p))
                if name is None:
                    continue
                if g is not None:
                    self._add(("parameter gradient", self._step, name, 0, "", ""), g, like=p)
                _, numbers, _ = numbers_of(p, self._platform)
                if numbers is not None:
                    self._before[name] = numbers

    def stepped(self, optimizer: Any) -> None:
        """Record updates after an optimizer's step. Implements `StepWatcher.stepped`."""
        with self._platform.no_dispatch():
            for name, p in self._parameters():
                before = self._before.pop(name, None)
                if before is None:
                    continue
                _, after, _ = numbers_of(p, self._platform)
                if after is not None and after.shape == before.shape:
                    finite = before[np.isfinite(before)]
                    scale = float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0
                    key = ("update", self._step, name, 0, "", "")
                    self._add(key, p, like=p, scale=scale, array=after - before)
                    self._updated = True
        if self._updated:
            self.step()

    def _gradient_on(self, p: Any) -> Any:
        """Return the gradient that a parameter holds; None if the framework returns gradients."""
        return p.grad if self._platform.accumulates_gradients else None

    # ------------------------------------------------------------------------------------------------- modules
    def _attach(self, root: Any) -> None:
        """Register hooks on the modules of ``root``."""
        prefix = ""
        if self._roots:
            taken = {name for name, _ in self._roots}
            prefix = base = type(root).__name__
            count = 1
            while prefix in taken:
                count += 1
                prefix = f"{base}_{count}"
        self._roots.append((prefix, root))
        platform = self._platform
        for path, module in list(platform.named_modules(root)):
            if id(module) in self._paths:
                continue
            path = ".".join(filter(None, (prefix, *(part for part in path.split(".") if part not in _WRAPPERS))))
            self._paths[id(module)] = path
            self._named.add(path)
            if platform.is_optimizer(module) or any(path.startswith(f"{own}.") for own in self._optimizers):
                self._optimizers.add(path)  # on some frameworks an optimizer is a module inside the module that trains
                continue
            for _, mesh in getattr(module, APPLIED, ()):
                self._parts.see(mesh)
            self._handles.append(
                platform.register_forward_pre_hook(module, self._opening, prepend=True, with_kwargs=True)
            )
            self._handles.append(platform.register_forward_hook(module, self._closing))

    def _opening(self, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        platform = self._platform
        if platform.is_compiling() or platform.in_backward():
            return
        if self._found_late >= 0 and self._open and self._open[-1] == (module, self._found_late):
            index, self._found_late = self._found_late, -1
        else:
            index = self._begin(module)
        self._take_inputs(module, index, (*args, *kwargs.values()))

    def _take_inputs(self, module: Any, index: int, values: tuple) -> None:
        with self._platform.no_dispatch():
            call = self._calls[index]
            numbers = []
            for slot, x in _slots(values, self._platform):
                place = self._placed(module, "input_layouts", slot)
                numbers.append(self._tensor(x, ("input", call.step, call.path, call.number, slot, ""), place))
            self._calls[index] = _with(call, inputs=tuple(numbers))

    def _closing(self, module: Any, args: Any, output: Any) -> None:
        platform = self._platform
        if platform.is_compiling() or platform.in_backward():
            return
        # An exception may have left nested calls open.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        if not self._open:
            return
        index = self._open.pop()[1]
        if index == self._found_late:
            self._found_late = -1
            self._take_inputs(module, index, args)
        with platform.no_dispatch():
            call = self._calls[index]
            numbers = []
            for slot, x in _slots((output,), platform):
                place = self._placed(module, "output_layouts", slot)
                numbers.append(self._tensor(x, ("output", call.step, call.path, call.number, slot, ""), place))
            self._calls[index] = _with(call, outputs=tuple(numbers))

    def _begin(self, module: Any) -> int:
        """Open a call, and a step if none is open."""
        if not self._begun:
            self._begun = True
            with self._platform.no_dispatch():
                self._describe_state()
        if any(module is root for _, root in self._roots):
            # Calls that are open below an earlier call of the root are left over from a failed call.
            places = [i for i, (other, _) in enumerate(self._open) if other is module]
            del self._open[places[0] if places else len(self._open) :]
        path = self._paths[id(module)]
        number = self._numbers.get((self._step, path), 0)
        self._numbers[self._step, path] = number + 1
        parent = self._open[-1][1] if self._open else -1
        self._calls.append(Call(self._step, path, type(module).__name__, number, parent))
        self._open.append((module, len(self._calls) - 1))
        return len(self._calls) - 1

    def _tensor(self, x: Any, key: tuple, placed: tuple[DeviceMesh, Placement] | None) -> int:
        """Return the number of a tensor. A new tensor is recorded."""
        known = self._tensors.get(id(x))
        if known is not None and known[0]() is x:
            return known[1]
        number = self._tensor_count
        self._tensor_count += 1
        self._tensors[id(x)] = (weakref.ref(x), number)
        self._add(key, x, placed=placed, tensor=number)
        platform = self._platform
        if platform.is_floating_point(x) and platform.requires_grad(x):
            layout = getattr(x, "_layout", None)
            of = key[0]

            def tell(cotangent: Any) -> None:
                # A leaf tensor of the program keeps the hook, and may be used in later steps.
                if not self._live or key[1] != self._step:
                    return
                with platform.no_dispatch():
                    self._add(
                        ("gradient", *key[1:5], of),
                        cotangent,
                        like=None,
                        layout=None if layout is None else layout.cotangent,
                        placed=None if placed is None else (placed[0], _cotangent(placed[1])),
                        tensor=number,
                    )

            platform.on_gradient(x, tell)
        return number

    def _placed(self, module: Any, attribute: str, slot: str) -> tuple[DeviceMesh, Placement] | None:
        """Return the mesh and placement of a module's plain input or output, from its style; None if unknown."""
        found = None
        for style, mesh in getattr(module, APPLIED, ()):
            desired = getattr(style, "desired_output_layouts", None) if attribute == "output_layouts" else None
            layouts = desired or getattr(style, attribute, None)
            layouts = layouts if isinstance(layouts, (tuple, list)) else (layouts,)
            index = int(slot) if slot.isdigit() else 0 if not slot else len(layouts)
            if index < len(layouts) and isinstance(layouts[index], Placement) and mesh.ndim == 1:
                found = (mesh, layouts[index])
                if attribute == "input_layouts":
                    return found
        return found

    # ------------------------------------------------------------------------------------------------- parameters
    def _saved(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter and buffer once, with its name in checkpoints."""
        found: dict[int, tuple[str, Any]] = {}
        named: set[int] = set()
        for prefix, root in self._roots:
            for own, x in self._platform.saved_tensors(root):
                name = ".".join(filter(None, (prefix, own)))
                if id(x) in named or any(name.startswith(f"{path}.") for path in self._optimizers):
                    continue
                # A cell that trains another cell contains its parameters too, under names that are no module paths.
                if name.rpartition(".")[0] in self._named:
                    named.add(id(x))
                elif id(x) in found:
                    continue
                found[id(x)] = (name, x)
        yield from found.values()

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for name, x in self._saved():
            if isinstance(x, self._platform.Parameter):
                yield name, x

    def _describe_state(self) -> None:
        """Record buffers, and in the first step also parameters."""
        for name, x in self._saved():
            kind = "parameter" if isinstance(x, self._platform.Parameter) else "buffer"
            if kind == "buffer" or self._step == 0:
                self._add((kind, self._step, name, 0, "", ""), x)

    def _add(
        self,
        key: Any,
        x: Any,
        *,
        like: Any = None,
        layout: Any = None,
        placed: tuple[DeviceMesh, Placement] | None = None,
        **more: Any,
    ) -> None:
        """Record a tensor. For gradients and updates, ``like`` is the parameter."""
        found = getattr(x, "_layout", None) or layout or getattr(like, "_layout", None)
        mesh, placement = placed if placed is not None and found is None else (None, None)
        self._parts.add(key, x, layout=found, mesh=mesh, placement=placement, **more)


#: Names under which wrappers hold a module. They are left out of its path.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def _with(call: Call, **changed: Any) -> Call:
    return Call(**{**vars(call), **changed})


def _cotangent(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _slots(values: Any, platform: Any, slot: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested values, each with its path in the values: empty for a single tensor, else for example
    ``"1.mask"``."""
    if platform.is_tensor(values):
        yield slot, values
        return
    if isinstance(values, Mapping):
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, (tuple, list)):
        items = [(str(i), value) for i, value in enumerate(values)]
        if len(values) == 1 and not slot:
            yield from _slots(values[0], platform, slot)
            return
    else:
        return
    for name, value in items:
        yield from _slots(value, platform, f"{slot}.{name}" if slot else name)
