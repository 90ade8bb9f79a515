"""torch's own `fully_shard` (FSDP2), and the similar `replicate`, on parallelised modules.

Torch's code stores each parameter as its own DTensor, distributed over the data-parallel and the tensor-parallel mesh.
While the module runs, torch replaces the parameter by a gathered tensor. This module gives torch each parameter as
torch's DTensor with the same placements. The gathered tensor then becomes a DTensor of this library, over the same
memory and with the planned layout. So styles find the tensors that they have distributed. The gradient is complete over
the tensor-parallel mesh, and torch reduces it over the data-parallel mesh.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.mesh_methods import MeshMethods
from hyper_parallel.platform.torch.basics.private import root_of_mesh
from hyper_parallel.platform.torch.basics.tensor import is_dtensor
from hyper_parallel.platform.torch.modules.modules import wrap_parameter
from hyper_parallel.platform.torch.native.native_dtensors import as_native, native_placements

__all__ = ["checking_parameters", "converting_parameter", "taking_meshes"]


def taking_meshes(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``DataParallelMeshInfo.__post_init__``, which gets each mesh that torch shards or replicates over. The
    wrapper converts meshes of this library to torch's."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if isinstance(self.mesh, MeshMethods):
            self.mesh = self.mesh.to_torch()
        original(self)

    return post_init


def checking_parameters(make: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``FSDPParamGroup.__init__``, which gets all parameters of a unit. The wrapper rejects unsuitable parameters
    on all ranks, before anything is changed."""

    @functools.wraps(make)
    def init(
        self: Any, params: Sequence[Any], modules: Any, mesh_info: Any, post_forward: Any, *args: Any, **kwargs: Any
    ) -> None:
        paths = {id(p): path for module in modules for path, p in module.named_parameters()}
        for p in params:
            if is_dtensor(p):
                _check(p, paths.get(id(p), "a parameter"), mesh_info, post_forward)
        return make(self, params, modules, mesh_info, post_forward, *args, **kwargs)

    return init


def _check(p: Any, path: str, mesh_info: Any, post_forward: Any) -> None:
    """Raise ValueError unless torch can shard the parameter ``p`` further."""
    layout = p._layout
    what = f"fully_shard: parameter {path!r}, of shape {tuple(layout.shape)} placed {list(layout.placements)},"
    if "_handed_over" in p.__dict__:
        raise ValueError(
            f"{what} belongs to another unit already: put modules with a shared parameter into one unit, "
            "fully_shard([module, other])"
        )
    try:
        native_placements(layout)
    except ValueError as error:
        raise ValueError(f"{what} cannot be converted to torch's DTensor: {error}") from None
    if getattr(mesh_info, "is_spmd_mesh", False):
        raise ValueError(
            f"{what} is on {layout.mesh} alone, but dp_mesh_dims needs parameters on all dimensions of the mesh: "
            "leave dp_mesh_dims out, and pass the data-parallel dimension to fully_shard, mesh=mesh['dp'].to_torch()"
        )
    data, model = mesh_info.mesh, layout.mesh
    wanted = (
        "use dimensions of one mesh for fully_shard and parallelize_module: mesh = init_device_mesh(..., "
        "mesh_dim_names=('dp', 'tp')), parallelize_module(model, mesh['tp'], plan), fully_shard(block, "
        "mesh=mesh['dp'].to_torch())"
    )
    theirs, ours = root_of_mesh(data), model.get_root_mesh()
    if theirs.mesh.tolist() != ours.ranks.tolist():
        raise ValueError(f"{what} is on a dimension of {ours}, but {data} belongs to another mesh, {theirs}: {wanted}")
    shared = set(data.mesh.flatten().tolist()) & set(model.ranks.ravel().tolist())
    if len(shared) != 1:
        raise ValueError(
            f"{what} is on {model}, which shares the ranks {sorted(shared)} with {data}. If hyper_parallel's "
            f"fully_shard has sharded the parameter already, leave torch's fully_shard out. Otherwise {wanted}"
        )
    if post_forward is not None and post_forward is not mesh_info:
        raise ValueError(
            f"{what} is tensor parallel, and torch reshards such parameters over all ranks or not at all: use "
            "reshard_after_forward=True or False"
        )


def converting_parameter(make: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``FSDPParam.__init__``: convert a DTensor of this library to torch's first, and store its layout."""
    cls = sys.modules[make.__module__].FSDPParam

    @functools.wraps(make)
    def init(
        self: Any,
        param: Any,
        module_info: Any,
        mesh_info: Any,
        post_forward: Any,
        device: Any,
        shard_placement_fn: Any,
        *args: Any,
    ) -> None:
        choose = shard_placement_fn
        if is_dtensor(param):
            self.__class__, self._layout = _keeping_layout(cls), param._layout
            found, param = param, _to_native(param)
            if shard_placement_fn is not None:
                choose = lambda _: shard_placement_fn(found)  # noqa: E731 - who chooses knows the model's parameters
            found._handed_over = True
        make(self, param, module_info, mesh_info, post_forward, device, choose, *args)

    return init


def _to_native(parameter: Any) -> Any:
    """Return a parameter of torch's own DTensor class with the same memory."""
    layout = parameter._layout
    with no_dispatch(), torch.no_grad():
        local = parameter.detach().contiguous()
        # Torch requires contiguous parameters.
        strides = torch.empty(layout.shape, device="meta").stride()
        return nn.Parameter(as_native(local, layout, strides), parameter.requires_grad)


@cache
def _keeping_layout(cls: type) -> type:
    """Return a subclass of ``FSDPParam`` for a parameter that was a DTensor of this library, with layout
    ``self._layout``."""

    def init_unsharded_param(self: Any) -> None:
        made = hasattr(self, "_unsharded_param")
        cls.init_unsharded_param(self)  # type: ignore[attr-defined]
        if made:
            return
        theirs = self._unsharded_param
        whole: Any = nn.Parameter(theirs._local_tensor, theirs.requires_grad)
        if hasattr(self, "unsharded_grad_dtype"):  # from torch 2.15 on gradients may have another dtype
            whole.grad_dtype = self.unsharded_grad_dtype
        wrap_parameter(whole, self._layout)
        # Torch reads the gradient in backward: `coalesce_gradients` must not complete it later.
        whole._read_in_backward = True
        self._unsharded_param = whole

    def get_grad_inner_tensor(self: Any, grad: Any) -> Any:
        with no_dispatch():
            return grad.as_subclass(Tensor)

    methods = {
        "__module__": cls.__module__,
        "init_unsharded_param": init_unsharded_param,
        "_get_grad_inner_tensor": get_grad_inner_tensor,
        #: Autograd has reduced the gradient over the tensor-parallel mesh when it arrives.
        "may_reduce_grad_outside_dp": False,
    }
    return type(cls.__name__, (cls,), methods)
