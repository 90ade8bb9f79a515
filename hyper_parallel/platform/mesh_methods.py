"""Methods of meshes that convert to and from meshes of torch.distributed; core itself names no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from hyper_parallel.platform.registry import get_platform, get_platform_for_device

__all__ = ["MeshMethods"]

_Mesh = TypeVar("_Mesh", bound="MeshMethods")


class MeshMethods(ABC):
    """Base class of `DeviceMesh` with the methods of torch.distributed's meshes."""

    @classmethod
    def from_torch(cls: type[_Mesh], torch_mesh: Any) -> _Mesh:
        """Convert a mesh of torch.distributed to a mesh with the same ranks, names and process groups. Makes no groups.

        A slice of a torch mesh becomes a slice of its converted root. So two slices of one torch mesh become two slices
        of one mesh. All ranks make this call, in the same order relative to the creation of other meshes.

        Args:
            torch_mesh: ``torch.distributed.device_mesh.DeviceMesh``.

        Returns:
            A `DeviceMesh`; an existing one if these ranks and names have one.

        Raises:
            TypeError: for anything else, and on a platform that is not torch's.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from hyper_parallel import DeviceMesh
            >>> mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
            >>> mesh["tp"].get_root_mesh() is mesh
            True
        """
        device_type = getattr(torch_mesh, "device_type", None)
        platform = get_platform_for_device(device_type) if isinstance(device_type, str) else get_platform()
        mesh: _Mesh = cls._of_native(platform, torch_mesh)
        return mesh

    def to_torch(self) -> Any:
        """Convert this mesh to a mesh of torch.distributed with the same ranks, names and process groups. Makes no
        groups.

        Slices of one mesh become slices of one torch mesh, as torch requires for the meshes of one model.

        Returns:
            ``torch.distributed.device_mesh.DeviceMesh``.

        Raises:
            TypeError: on a platform that is not torch's.
            ValueError: on a rank outside the mesh; for a mesh of several dimensions without names, ranks that do not
                ascend along each dimension, and dimensions that were flattened.

        Example:
            >>> from hyper_parallel import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> mesh["dp"].to_torch().mesh_dim_names
            ('dp',)
        """
        return self._to_native()

    def _get_root_mesh(self) -> Any:
        """Return the root mesh, under the name that torch's wrappers call."""
        return self.get_root_mesh()

    @abstractmethod
    def get_root_mesh(self) -> Any:
        """Return the mesh that this mesh was sliced from, or itself."""

    @abstractmethod
    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the framework's process group of this rank along a dimension."""

    @classmethod
    @abstractmethod
    def _of_native(cls, platform: Any, native: Any) -> Any:
        """Make a mesh from a mesh of the framework."""

    @abstractmethod
    def _to_native(self) -> Any:
        """Make a mesh of the framework from this mesh."""
