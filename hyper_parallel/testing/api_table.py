"""The table of docs/coming_from_torch.md: every public name of torch's distributed tensors, next to this library's.

python -m hyper_parallel.testing.api_table             # print it, for the installed torch
python -m hyper_parallel.testing.api_table --write docs/coming_from_torch.md
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hyper_parallel
from hyper_parallel import experimental
from hyper_parallel.testing.api_notes import DIFFERENT, MORE, NOT_HERE

__all__ = ["Row", "rows", "table", "unexplained", "with_table"]

BEGIN = "<!-- made by python -m hyper_parallel.testing.api_table: do not edit -->"
END = "<!-- end -->"


class Row(NamedTuple):
    """A row of the table: one public name.

    Attributes:
        theirs: module and name in torch.
        ours: name in this library, None where it has none.
        missing: torch's keywords that this library does not take.
        further: keywords that only this library takes.
        state: ``"same"``, ``"more"``, ``"differs"`` or ``"not here"``.
        why: the addition or difference, or the name that is used instead.
    """

    theirs: tuple[str, str]
    ours: str | None
    missing: tuple[str, ...]
    further: tuple[str, ...]
    state: str
    why: str


def rows() -> list[Row]:
    """Return a row for each public name of the installed torch."""
    from hyper_parallel.testing.adapters.torch_api import public_names

    return [_row(each) for each in public_names()]


def _row(known: Any) -> Row:
    home, value, found = _find(known.name)
    keywords = _keywords(value) if found else None
    missing: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    if found and known.keywords is not None and keywords is not None:
        missing = tuple(key for key in known.keywords if key not in keywords)
        further = tuple(key for key in keywords if key not in known.keywords)
    why = NOT_HERE.get(known.name) or DIFFERENT.get(known.name) or MORE.get(known.name) or ""
    state = "not here" if not found else "differs" if known.name in DIFFERENT else "same"
    if state == "same" and (further or known.name in MORE):
        state = "more"
    if state == "more" and further:
        why = "; ".join(filter(None, (why, f"also {', '.join(f'`{key}`' for key in further)}")))
    return Row((known.module, known.name), home if found else None, missing, further, state, why)


def _find(name: str) -> tuple[str, Any, bool]:
    """Return the full name in this library, the object, and whether the name exists."""
    top, _, attribute = name.partition(".")
    place = next((each for each in (hyper_parallel, experimental) if top in each.__all__), None)
    if place is None:
        return "", None, False
    value = getattr(place, top)
    home = f"{place.__name__}.{name}"
    if not attribute:
        return home, value, True
    if attribute in _ATTRIBUTES.get(top, ()):
        return home, None, True
    try:
        member = inspect.getattr_static(value, attribute)
    except AttributeError:
        return home, None, False
    return home, getattr(member, "__func__", member), True


#: Attributes that only instances have, not their classes.
_ATTRIBUTES = {
    "DeviceMesh": ("device_type", "mesh_dim_names", "ndim", "shape"),
    "Partial": ("reduce_op",),
    "Shard": ("dim",),
}


def _keywords(value: Any) -> tuple[str, ...] | None:
    if inspect.isclass(value):
        made = (vars(cls).get(way) for cls in value.__mro__ for way in ("__init__", "__new__"))
        named = (f for f in made if f is not None and "args" not in inspect.signature(f).parameters)
        value = next(named, value)
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return None
    names = [name for name in parameters if name not in ("self", "cls", "args", "kwargs") and name[0] != "_"]
    if "options" in names:  # the keywords of tensor factories
        names = [name for name in names if name != "options"] + list(_FACTORY_OPTIONS)
    return tuple(names)


_FACTORY_OPTIONS = ("dtype", "layout", "device", "requires_grad", "device_mesh", "placements")


def unexplained(found: Sequence[Row]) -> list[str]:
    """Return a line for each missing name, and for each missing keyword, that no note explains."""
    wrong = [f"{'.'.join(row.theirs)} is not here" for row in found if row.state == "not here" and not row.why]
    for row in found:
        untold = [key for key in row.missing if f"`{key}`" not in row.why]
        if untold:
            wrong.append(f"{'.'.join(row.theirs)} takes {', '.join(untold)}")
    return wrong


def table(found: Sequence[Row]) -> str:
    """Return the rows in Markdown, with a table for each module."""
    lines: list[str] = []
    module = ""
    for row in found:
        if row.theirs[0] != module:
            module = row.theirs[0]
            lines += ["", f"### `{module}`", "", "| torch | here | | |", "|---|---|---|---|"]
        here = "" if row.ours is None else f"`{row.ours.removeprefix('hyper_parallel.')}`"
        lines.append(f"| `{row.theirs[1]}` | {here} | {row.state} | {row.why} |")
    return "\n".join(lines).strip()


def with_table(page: str, found: Sequence[Row]) -> str:
    """Return ``page`` with its table replaced by a table of the rows ``found``."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it into a page. Return 1 if anything is missing without an explanation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="PAGE", type=Path, help="a page with the marks of the table")
    options = parser.parse_args(arguments)
    found = rows()
    if options.write is None:
        print(table(found))
    else:
        options.write.write_text(with_table(options.write.read_text("utf-8"), found), "utf-8")
    for line in unexplained(found):
        print(f"unexplained: {line}")
    return 1 if unexplained(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
