"""The pages of the documentation fit the library, and the site is made of all of them."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel
from ci import docs_hooks, error_table

pytestmark = pytest.mark.usefixtures("unmeasured")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Modules whose ``__all__`` the reference has, besides the package.
MODULES = (
    "hyper_parallel.checkpoint",
    "hyper_parallel.debug",
    "hyper_parallel.integrations.huggingface",
    "hyper_parallel.mindspore",
    "hyper_parallel.planning",
    "hyper_parallel.platform",
    "hyper_parallel.torch",
)


def referenced() -> set[str]:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    return set(re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE))


def public() -> dict[str, Any]:
    """Full name -> its object, one name for each thing."""
    found = {f"hyper_parallel.{name}": getattr(hyper_parallel, name) for name in hyper_parallel.__all__}
    known = {id(value) for value in found.values()}
    for module in map(importlib.import_module, MODULES):
        more = {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
        found |= {name: value for name, value in more.items() if id(value) not in known}
    # A module has a page of its own, a table of machines its functions.
    return {name: value for name, value in found.items() if inspect.isclass(value) or callable(value)}


def test_every_public_name_is_in_the_reference() -> None:
    assert referenced() == set(public())


#: Names of `DeviceMesh` that users call: those of torch's meshes, and what this library adds.
OF_MESHES = {
    *("from_group", "get_all_groups", "get_coordinate", "get_group", "get_local_rank", "get_rank", "mesh", "size"),
    *("from_torch", "get_root_mesh", "to_torch"),
}


def test_the_reference_of_meshes_has_no_internals() -> None:
    text = (DOCS / "reference" / "meshes_and_tensors.md").read_text(encoding="utf-8")
    patterns = re.search(r"^::: hyper_parallel\.DeviceMesh\n.*?filters: (\[.*?\])\n", text, re.MULTILINE | re.DOTALL)
    assert patterns is not None
    hidden = [re.compile(pattern.removeprefix("!")) for pattern in re.findall(r'"([^"]+)"', patterns[1])]
    mesh = hyper_parallel.DeviceMesh
    members = {name for cls in mesh.__mro__[:-1] for name, x in vars(cls).items() if getattr(x, "__doc__", None)}
    assert {name for name in members if not any(pattern.search(name) for pattern in hidden)} == OF_MESHES
    named = set(
        re.findall(r"^\s+(\w+): ", (mesh.__doc__ or "").split("Attributes:")[1].split("Raises:")[0], re.MULTILINE)
    )
    assert named == {"device_type", "platform", "ranks", "mesh_dim_names", "shape", "ndim"}


def test_every_public_name_is_documented() -> None:
    missing = []
    for name, value in public().items():
        members = vars(value).items() if inspect.isclass(value) else ()
        own = {f"{name}.{key}": member for key, member in members if not key.startswith("_")}
        for path, member in {name: value, **own}.items():
            described = callable(member) or isinstance(member, (property, classmethod, staticmethod))
            if described and not inspect.getdoc(getattr(value, path.rpartition(".")[2], member)):
                missing.append(path)
    assert missing == []


def test_the_site_has_every_page() -> None:
    """Read without a YAML parser: the pages after ``nav:``."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", settings.split("\nnav:\n")[1], re.MULTILINE)
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(docs_hooks.PAGES.values())
    assert sorted(named) == sorted(there)


def test_the_indexes_name_every_page() -> None:
    """The home page names the indexes, and these all other pages."""
    indexes = sorted(DOCS.glob("**/index.md"))
    linked: set[Path] = set()
    for index in indexes:
        targets = re.findall(r"\]\(([\w/.]+\.md)", index.read_text(encoding="utf-8"))
        linked |= {(index.parent / target).resolve() for target in targets}
    assert set(DOCS.rglob("*.md")) - linked <= {DOCS / "index.md"}


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("styles.md", "[a](../README.md#x)", "[a](overview.md#x)"),
        ("tutorials/gpt.md", "[a](../styles.md)", "[a](../styles.md)"),
        ("overview.md", "[a](docs/styles.md) ![p](docs/benchmarks.svg)", "[a](styles.md) ![p](benchmarks.svg)"),
        ("examples/train_llama.md", "[`b`](../../docs/loss.md)", "[`b`](../loss.md)"),
        ("styles.md", "[code](../hyper_parallel/torch.py)", "code"),
        ("styles.md", "[gone](../nothing.py) [out](https://x.org/a)", "[gone](../nothing.py) [out](https://x.org/a)"),
        ("styles.md", "`[a](../README.md)` x[0](1)", "`[a](../README.md)` x[0](1)"),
    ],
)
def test_links(page: str, before: str, after: str) -> None:
    assert docs_hooks.relinked(before, page) == after


def test_errors_that_are_explained_are_raised() -> None:
    """Each quotation on the page is the text of an error, as the table has it, or its beginning."""
    texts = [" ".join(error.text.split()) for error in error_table.texts()]
    quoted = re.findall(r"^> (.+)$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) > 15
    begins = [text for text in quoted if text.endswith("…") and text not in texts]
    assert [text for text in begins if not any(whole.startswith(text[:-1]) for whole in texts)] == []
    assert [text for text in quoted if text not in texts and text not in begins] == []


def test_texts_of_errors() -> None:
    """Texts that are handed to a function that raises them, and texts in a variable, are seen too."""
    found = {(error.kind, error.text): error.path for error in error_table.texts()}
    assert len(found) > 400
    assert found["ValueError", "the plan's … matches no module…"] == "core/tensor_parallel/checks/plan.py"
    assert any(text.startswith("… got a plain tensor (") for _, text in found)
    table = error_table.table()
    assert docs_hooks.ERRORS in (DOCS / "errors.md").read_text(encoding="utf-8")
    assert all(f"### {area}" in table for area in error_table.AREAS.values() if area != "The package")


def test_errors_that_no_test_reached(tmp_path: Path) -> None:
    """`ci.raises` lists the errors that did not run. Errors that are raised again and errors for tests are left out."""
    pytest.importorskip("coverage")
    from ci import raises

    package = tmp_path / "package"
    (package / "testing").mkdir(parents=True)
    lines = (
        "def f(x):",
        "    if x:",
        "        raise ValueError('a')",
        "    try:",
        "        g()",
        "    except KeyError:",
    )
    text = "\n".join((*lines, "        raise", "    raise TypeError('b')", ""))
    (package / "a.py").write_text(text, encoding="utf-8")
    (package / "testing" / "b.py").write_text("raise ValueError\n", encoding="utf-8")
    assert raises.unreached(package, {"package/a.py": {1, 2, 3}}) == (2, ["package/a.py:8: raise TypeError('b')"])
    assert raises.unreached(package, {"package/a.py": {3, 8}}) == (2, [])
    # A statement that has to stay, until it is gone or a test reaches it.
    kept = {("a.py", "TypeError('b')"): "why", ("a.py", "TypeError('c')"): "why"}
    assert raises.unreached(package, {"package/a.py": {3}}, kept) == (2, [])
    assert raises.outdated(package, {"package/a.py": {3}}, kept) == [("a.py", "TypeError('c')")]
    assert raises.outdated(package, {"package/a.py": {3, 8}}, kept) == [*kept]
    assert all(reason.endswith(".") for reason in raises.KEPT.values())
    assert [entry for entry in raises.outdated(raises.PACKAGE, {}) if entry] == []
