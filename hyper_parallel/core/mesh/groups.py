"""Process groups of a mesh, as `DeviceMesh.groups`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform import Platform

__all__ = ["NO_OVERRIDES", "MeshGroups", "Overrides", "override_of"]

#: (backend, options) for the groups of each mesh dimension; None for the platform's defaults.
Overrides = tuple[tuple[Any, Any], ...]
#: The `Overrides` of a mesh without any.
NO_OVERRIDES: Overrides = ()


class MeshGroups:
    """The process groups of this rank, one along each dimension of a mesh.

    Args:
        platform: the platform of the mesh.
        own: the groups, as the platform's collectives take them. An entry is None if this rank is outside the mesh.
        overrides: how the groups were created. They are stored because options are compared by identity and must live
            as long as the mesh.

    Attributes:
        own: the argument.
    """

    def __init__(self, platform: Platform, own: tuple[Any, ...], overrides: Overrides = NO_OVERRIDES) -> None:
        self.own = own
        self._platform, self._overrides = platform, overrides
        #: On a root mesh: weak reference to the framework's mesh that shares the groups. It is weak because that mesh
        #: may hold groups, which must not outlive the default group.
        self._native_mesh: Callable[[], Any] | None = None

    def native(self, mesh_dim: int) -> Any:
        """Return the framework's process group along a dimension."""
        return self._platform.native_group(self.own[mesh_dim])

    def keys(self) -> tuple[Any, ...]:
        """Return the keys that distinguish these process groups from others."""
        return tuple(self._platform.describe_group(self.native(dim)).key for dim in range(len(self.own)))

    def native_mesh(self) -> Any:
        """Return the framework's mesh that shares the groups, or None if it is not referenced any more."""
        return None if self._native_mesh is None else self._native_mesh()

    def share_with(self, native_mesh: Callable[[], Any]) -> None:
        """Store a weak reference to the framework's mesh that shares the groups, for `native_mesh`."""
        self._native_mesh = native_mesh


def override_of(value: Any) -> tuple[Any, Any]:
    """Return (backend, options) from an entry of ``backend_override``, which gives one of the two or both."""
    if isinstance(value, tuple):
        backend, options = value
        return backend, options
    return (value, None) if isinstance(value, str) or value is None else (None, value)
