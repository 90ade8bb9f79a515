"""Process groups of a mesh: a part of `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform import Platform

__all__ = ["NO_OVERRIDES", "MeshGroups", "Overrides", "override_of"]

#: For each dimension the backend and the options of its groups, None for the platform's own.
Overrides = tuple[tuple[Any, Any], ...]
#: Of a mesh that has none.
NO_OVERRIDES: Overrides = ()


class MeshGroups:
    """The groups of this rank, one along each dimension of a mesh.

    Args:
        platform: that of the mesh.
        own: the groups, as the platform's verbs take them; None along a dimension of a mesh without this rank.
        overrides: how they were made. Options are told apart by identity, so they live as long as the mesh.

    Attributes:
        own: as given.
    """

    def __init__(self, platform: Platform, own: tuple[Any, ...], overrides: Overrides = NO_OVERRIDES) -> None:
        self.own = own
        self._platform, self._overrides = platform, overrides
        #: Of a root: gives the framework's mesh that shares its groups, while it is referenced. Kept weakly, because it
        #: may hold groups, which must not outlive the default group.
        self._native_mesh: Callable[[], Any] | None = None

    def native(self, mesh_dim: int) -> Any:
        """The framework's process group along a dimension."""
        return self._platform.native_group(self.own[mesh_dim])

    def keys(self) -> tuple[Any, ...]:
        """The keys that distinguish these process groups from others."""
        return tuple(self._platform.describe_group(self.native(dim)).key for dim in range(len(self.own)))

    def native_mesh(self) -> Any:
        """The framework's mesh that shares the groups; None where it is not referenced any more."""
        return None if self._native_mesh is None else self._native_mesh()

    def share_with(self, native_mesh: Callable[[], Any]) -> None:
        """Let `native_mesh` find a mesh of the framework, by a weak reference to it."""
        self._native_mesh = native_mesh


def override_of(value: Any) -> tuple[Any, Any]:
    """The backend and the options that an entry of ``backend_override`` says: one of the two, or both."""
    if isinstance(value, tuple):
        backend, options = value
        return backend, options
    return (value, None) if isinstance(value, str) or value is None else (None, value)
