"""Installing and taking back patches, on a framework made here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hyper_parallel.platform import patching
from hyper_parallel.platform.patching import Patch, PatchSet, installed, takes
from tests.support.patch_table import table, with_table


class Base:
    def inherited(self) -> str:
        return "plain"


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with the members of frameworks: a class, functions, a list, a dict; and one that holds a function of it.
    The patches of real frameworks, which other tests have installed, are none of its business."""
    monkeypatch.setattr(patching, "_INSTALLED", [])
    module: Any = types.ModuleType("fw")
    exec("def clip(x, limit): return min(x, limit)\ndef other(x): return x", module.__dict__)

    class Tensor(Base):
        def step(self) -> str:
            return "plain step"

        @classmethod
        def apply(cls) -> str:
            return cls.__name__

    module.Tensor, module.names, module.table = Tensor, ["a"], {"Tensor": Tensor}
    sub: Any = types.ModuleType("fw.sub")
    sub.clip = sub.again = module.clip
    module.sub = sub
    sys.modules.update({"fw": module, "fw.sub": sub})
    yield module
    del sys.modules["fw"], sys.modules["fw.sub"]


def marked(original: Any) -> Any:
    """A replacement that says so."""
    function = getattr(original, "__func__", original)

    def replaced(*args: Any) -> str:
        return f"patched {function(*args)}"

    replaced.__wrapped__ = function  # type: ignore[attr-defined]
    return classmethod(replaced) if isinstance(original, classmethod) else replaced


def patch(*targets: str, make: Callable[[Any], Any] = marked, **more: Any) -> Patch:
    return Patch(targets, "numbers are wrong", "1.0 to 1.2", make, **more)


EVERY_KIND = (
    patch("fw.Tensor.step"),
    patch("fw.Tensor.apply"),
    patch("fw.Tensor.inherited", held="inherited"),
    patch("fw.Tensor.added", make=lambda _: "added", held="absent"),
    patch("fw.table[Tensor].more", make=lambda _: "more", held="absent"),
    patch("fw.names[]", make=lambda names: "mine", held="absent"),
    patch("fw.table[Mine]", make=lambda names: int, held="absent"),
    patch("fw.clip", "fw.sub.clip", check=takes("x limit")),
)


def state_of(framework: Any) -> tuple:
    return (
        dict(vars(framework.Tensor)),
        dict(vars(framework.sub)),
        framework.clip,
        framework.other,
        list(framework.names),
        dict(framework.table),
    )


def test_every_kind_is_installed_and_taken_back(framework: Any) -> None:
    before, patches = state_of(framework), PatchSet("fw", "1.0", EVERY_KIND)
    assert patches.installed == () and "fw" not in installed()
    for _ in range(2):
        patches.install()
        assert patches.installed == EVERY_KIND == installed()["fw"]
        x = framework.Tensor()
        assert (x.step(), x.apply(), x.inherited()) == ("patched plain step", "patched Tensor", "patched plain")
        assert (x.added, x.more, framework.names) == ("added", "more", ["a", "mine"])
        assert framework.table == {"Tensor": framework.Tensor, "Mine": int}
        assert framework.clip is framework.sub.clip and framework.clip(3, 2) == "patched 2"
        assert framework.sub.again(3, 2) == 2
        there = state_of(framework)
        patches.install()  # is there already
        assert state_of(framework) == there
        patches.uninstall()
        assert state_of(framework) == before and "fw" not in installed()
        patches.uninstall()  # is not there any more


def test_everywhere(framework: Any) -> None:
    before, patches = state_of(framework), PatchSet("fw", "1.0", [patch("fw.clip", everywhere=True)])
    patches.install()
    assert framework.sub.again is framework.sub.clip is framework.clip is not before[2]
    patches.uninstall()
    assert state_of(framework) == before


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (patch("fw.Tensor.gone"), r"fw.Tensor.gone is missing, but expected to be defined there"),
        (patch("fw.Tensor.inherited"), r"fw.Tensor.inherited is inherited, but expected to be defined there"),
        (patch("fw.Tensor.step", held="inherited"), r"fw.Tensor.step is defined there, but expected to be inherited"),
        (patch("fw.Tensor.step", held="absent"), r"fw.Tensor.step is defined there, but expected to be missing"),
        (
            patch("fw.table[Tensor]", held="absent"),
            r"fw.table\[Tensor\] is defined there, but expected to be missing",
        ),
        (patch("fw.gone.clip"), r"fw.gone.clip does not exist \("),
        (patch("fw.table[Gone].step"), r"fw.table\[Gone\].step does not exist \("),
        (patch("gone.clip"), r"gone.clip does not exist \("),
        (patch("fw.clip", "fw.other"), r"fw.other is not the same object as fw.clip"),
        (patch("fw.clip", check=takes("x norm")), r"fw.clip takes \('x', 'limit'\) and not \('x', 'norm'\)"),
        (patch("fw.names"), r"fw.names is not a function;"),
        (patch("fw.names", check=takes("x")), r"fw.names is not a function of known parameters"),
    ],
)
def test_all_or_nothing(framework: Any, wrong: Patch, what: str) -> None:
    """A target that is not as expected stops all; the message gives the problem, the version, and the reason."""
    before, patches = state_of(framework), PatchSet("fw", "9.9", [*EVERY_KIND, wrong])
    with pytest.raises(RuntimeError, match=rf"^fw 9\.9: {what}.*tested with 1.0 to 1.2.*numbers are wrong.*unchanged"):
        patches.install()
    assert state_of(framework) == before and "fw" not in installed() and patches.installed == ()


def test_what_only_saves_time_is_left_out(framework: Any) -> None:
    patches = PatchSet("fw", "9.9", [patch("fw.gone", required=False), patch("fw.clip")])
    with pytest.warns(RuntimeWarning, match=r"^fw 9.9: fw.gone is missing.*left out: numbers are wrong"):
        patches.install()
    assert patches.installed == patches.patches[1:]


def test_what_cannot_be_written_stops_all(framework: Any) -> None:
    """An unwritable target stops all patches, even if it is found this late."""
    before = state_of(framework)
    patches = PatchSet("fw", "1.0", [patch("fw.clip"), patch("builtins.int.real", check=lambda original: None)])
    with pytest.raises(TypeError, match="real"):
        patches.install()
    assert state_of(framework) == before and patches.installed == ()


def test_what_somebody_changed_since_is_left(framework: Any) -> None:
    patches = PatchSet("fw", "1.0", EVERY_KIND)
    patches.install()
    framework.clip = theirs = marked(framework.clip)
    framework.names.remove("mine")
    framework.table["Mine"] = str
    with pytest.warns(RuntimeWarning) as seen:
        patches.uninstall()
    assert sorted(str(w.message).partition(" was")[0] for w in seen) == [
        "fw.clip",
        "fw.names[]",
        "fw.table[Mine]",
    ]
    assert framework.clip is theirs and framework.clip(3, 2) == "patched patched 2"
    assert framework.table["Mine"] is str
    assert framework.Tensor().step() == "plain step"


def test_table() -> None:
    """Neighbours that differ in their targets share a row; targets that differ in one part share a name."""
    text = table(
        [
            patch("fw.Tensor.step"),
            patch("fw.Other.step", "fw.Third.step", "fw.clip"),
            patch("fw.a.b", "fw.c.d", required=False),
            patch("fw.names[]", held="absent", everywhere=True),
            patch("fw.Tensor.added", held="absent"),
        ]
    )
    assert text.splitlines()[2:] == [
        "| `fw.{Tensor, Other, Third}.step`, `fw.clip` | numbers are wrong | 1.0 to 1.2 | no DTensors |",
        "| `fw.a.b`, `fw.c.d` | numbers are wrong | 1.0 to 1.2 | left out |",
        "| `fw.names[]`, wherever the framework has it | numbers are wrong | 1.0 to 1.2 | no DTensors |",
        "| `fw.Tensor.added` | numbers are wrong | 1.0 to 1.2 | no DTensors |",
    ]


def test_table_in_its_page() -> None:
    page = "a\n<!-- made by python -m tests.support.patch_table fw: do not edit -->\nold\n<!-- end -->\nb\n"
    made = with_table(page, "fw", "new")
    assert made == page.replace("\nold\n", "\n\nnew\n\n") and with_table(made, "fw", "new") == made
    with pytest.raises(ValueError, match="patch_table other: do not edit"):
        with_table(page, "other", "new")


def test_a_patch_waits_for_its_module(framework: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fw_late.py").write_text("def slow(): return 'plain'\nmarks = set()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = (
        patch("fw_late.slow", after="fw_late"),
        patch("fw_late.marks[]", make=lambda _: 1, held="absent", after="fw_late"),
    )
    finders = list(sys.meta_path)
    waiting = PatchSet("fw", "1.0", [*EVERY_KIND, *late])
    waiting.install()
    assert "fw_late" not in sys.modules and not set(late) & set(waiting.installed)
    import fw_late

    assert (fw_late.slow(), fw_late.marks) == ("patched plain", {1}) and set(late) <= set(waiting.installed)
    waiting.uninstall()
    assert (fw_late.slow(), fw_late.marks) == ("plain", set()) and sys.meta_path == finders
    waiting.install()
    assert fw_late.slow() == "patched plain", "it is there now"
    waiting.uninstall()
    del sys.modules["fw_late"]
    waiting.install()
    waiting.uninstall()
    assert sys.meta_path == finders
    import fw_late

    assert fw_late.slow() == "plain", "nothing waits any more"
    del sys.modules["fw_late"]
