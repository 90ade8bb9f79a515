"""Errors for a rank that is lost during a collective, and for ranks that differ under `check_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.program_places import line_of_program

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: Errors of local computations. ValueError and TypeError are not among them, because all ranks raise those.
_LOCAL_ERRORS = (RuntimeError, IndexError, MemoryError, ArithmeticError)


class CollectiveError(RuntimeError):
    """A collective failed because some ranks did not take part: they ended, hang, or run other code. Every waiting rank
    raises this error, a few seconds after the process group's time-out at the latest. The ``__cause__`` is the error of
    the backend. The process group may be unusable afterwards.

    Attributes:
        collective: name of the collective: ``"all_reduce"``, ``"all_gather"``, ...
        ranks: global ranks that should have taken part.
        missing: the ranks among them that did not report that they were waiting; None if that is unknown.

    Example:
        >>> from hyper_parallel import CollectiveError
        >>> issubclass(CollectiveError, RuntimeError)
        True
    """

    def __init__(self, message: str, collective: str, ranks: tuple[int, ...], missing: tuple[int, ...] | None) -> None:
        super().__init__(message)
        self.collective = collective
        self.ranks = ranks
        self.missing = missing

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.collective, self.ranks, self.missing)


class RankMismatchError(ValueError):
    """Ranks have passed inconsistent values or, inside `check_ranks`, were about to do different things.

    All ranks raise this error, before anything is done.

    Attributes:
        ranks: global ranks whose value differs from the majority's or, without a majority, from the first rank's.

    Example:
        >>> from hyper_parallel import RankMismatchError
        >>> issubclass(RankMismatchError, ValueError)
        True
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.ranks)


def names_of(ranks: Sequence[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 1, 3"``, for messages."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def describe_dim(mesh: DeviceMesh, mesh_dim: int) -> str:
    """Return a description of a mesh dimension for messages: ``"along mesh dimension 0 ('tp')"``."""
    return f"along mesh dimension {mesh.dim_label(mesh_dim)}"


def explain_along(error: Exception, collective: str, local: Any, mesh: DeviceMesh, mesh_dim: int) -> None:
    """Call `explain` for a collective of the tensor ``local`` along a mesh dimension."""
    platform = mesh.platform
    tensor = f" of a {local.dtype} tensor of shape {tuple(platform.shape_of(local))}" if local is not None else ""
    what = f"{collective}{tensor} {describe_dim(mesh, mesh_dim)}"
    explain(error, collective, what, platform, mesh.platform_group(mesh_dim), mesh.ranks_along(mesh_dim))


def explain(error: Exception, collective: str, what: str, platform: Any, group: Any, ranks: Sequence[int]) -> None:
    """Raise CollectiveError from ``error`` if a lost rank caused ``error``; otherwise do nothing.

    Args:
        error: the error that the platform's collective raised.
        collective: name of the collective.
        what: the collective with its operand, for messages.
        platform, group, ranks: the platform, the group and the global ranks of the collective.

    Raises:
        CollectiveError: when a rank was lost.
    """
    if not platform.is_communication_failure(error):
        return
    members = tuple(ranks)
    report = f"{what} among {names_of(members)}"
    line = line_of_program(platform.Tensor)
    own = f"{report}, at {line}"
    found = platform.find_missing_ranks(group, members, own)
    reports, missing = ({}, None) if found is None else found
    silent = [rank for rank in missing or () if rank not in reports]
    text = f"{report} failed on rank {platform.rank()}"
    if missing is None:
        text += "; it is unknown which ranks did not take part"
    elif silent:
        text += f": {names_of(silent)} did not take part, and {'has' if len(silent) == 1 else 'have'} ended, or "
        text += "hangs" if len(silent) == 1 else "hang"
    elif not missing:
        text += ": all ranks are alive, but have lost their connection or wait in different collectives"
    lines = [text, *(f"rank {r} failed in {other}" for r, other in sorted(reports.items()) if other != own)]
    lines.append(f"it was called at {line}")
    lines.append(f"the backend says: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}")
    raise CollectiveError("\n".join(lines), collective, members, missing) from error


def tell_of_failure(error: Exception, what: str, mesh: DeviceMesh) -> None:
    """Report to the other ranks that the operation ``what`` failed on this rank, so that they stop waiting.

    Return when the other ranks have failed in the same way, or have received the report.
    """
    if not isinstance(error, _LOCAL_ERRORS) or isinstance(error, CollectiveError) or hasattr(error, _TOLD):
        return
    error.__dict__[_TOLD] = True  # enclosing modules raise the same error again
    if mesh.size() == 1 or mesh.get_coordinate() is None or mesh.platform.is_communication_failure(error):
        return
    groups = [mesh.platform_group(d) for d in range(mesh.ndim) if mesh.shape[d] > 1]
    message = (str(error).strip() or repr(error)).splitlines()[0]
    ranks = tuple(int(rank) for rank in mesh.ranks.ravel())
    mesh.platform.tell_of_failure(groups, ranks, f"{what}: {type(error).__name__}: {message}")


_TOLD = "_hyper_parallel_told"
