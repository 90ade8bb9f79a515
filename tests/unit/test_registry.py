"""The registry of backends: names, aliases, detection, entry points, errors. No framework is needed or imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hyper_parallel.platform import (
    Platform,
    PlatformError,
    available_platforms,
    get_platform,
    get_platform_for_device,
    register_platform,
    registry,
)
from hyper_parallel.platform.contract import NOTHING_FASTER, Fast, LinearCollective


class _Backend:
    """Stands for a Platform subclass: the registry only asks for these."""

    name = "fake"
    device_type = "fake"
    reason: str | None = None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cls.reason


def backend(name: str, device_type: str, reason: str | None = None) -> Any:
    return type("Fake", (_Backend,), {"name": name, "device_type": device_type, "reason": reason})


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry with four fakes in place of the built-in backends, in which nothing is selected."""
    built_in = (
        backend("torch-cuda", "cuda", "no GPU"),
        backend("torch-npu", "npu", "torch_npu is installed, CANN is not: no libascendcl.so"),
        backend("torch-cpu", "cpu"),
        backend("mindspore", "cpu"),
    )
    monkeypatch.setattr(registry, "_backends", {b.name: registry._Backend(b.name, b, None) for b in built_in})
    monkeypatch.setattr(registry, "_aliases", dict(registry._aliases))
    monkeypatch.setattr(registry, "_selected", None)
    monkeypatch.setattr(registry, "_entry_points_read", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    for framework in ("torch", "mindspore"):
        monkeypatch.delitem(sys.modules, framework, raising=False)
    yield


def test_importing_the_registry_imports_no_framework() -> None:
    code = "import sys, hyper_parallel, hyper_parallel.platform; print({'torch', 'mindspore'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("torch-cpu", "torch-cpu"),
        ("Torch_CPU", "torch-cpu"),
        ("cpu", "torch-cpu"),
        ("torch", "torch-cpu"),
        ("pytorch", "torch-cpu"),
        ("mindspore", "mindspore"),
        ("ms", "mindspore"),
    ],
)
def test_names_and_aliases(name: str, chosen: str) -> None:
    assert get_platform(name).name == chosen
    assert get_platform(name) is get_platform(chosen)


def test_an_alias_of_a_framework_takes_its_best_device() -> None:
    registry._backends["torch-npu"].target = backend("torch-npu", "npu")
    assert get_platform("torch").name == "torch-npu"


@pytest.mark.parametrize("name", ["torch-gpu", "cpuu", ""])
def test_unknown_name(name: str) -> None:
    with pytest.raises(PlatformError) as error:
        get_platform(name)
    message = str(error.value)
    assert repr(name) in message
    for line in ("torch-cpu: available", "torch-cuda: not available: no GPU", "CANN is not: no libascendcl.so"):
        assert line in message


@pytest.mark.parametrize("name", ["torch-npu", "npu", "ascend", "torch-cuda", "cuda", "gpu"])
def test_known_but_unavailable(name: str) -> None:
    with pytest.raises(PlatformError, match=r"cannot be used here: (no GPU|torch_npu is installed, CANN)") as error:
        get_platform(name)
    assert "mindspore: available" in str(error.value)


def test_a_name_is_a_string() -> None:
    with pytest.raises(TypeError, match="'torch-cpu'"):
        get_platform(3)  # type: ignore[arg-type]


def test_environment_variable_selects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, " MindSpore ")
    chosen = get_platform()
    assert chosen.name == "mindspore"
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "torch-cpu")
    assert get_platform() is chosen


def test_environment_variable_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "tensorflow")
    with pytest.raises(PlatformError, match="HYPER_PARALLEL_PLATFORM='tensorflow' was asked for"):
        get_platform()


def imported(name: str) -> ModuleType:
    module = ModuleType(name)
    module.Tensor = object  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("in_program", "installed", "chosen", "why"),
    [
        (["mindspore"], ["torch", "mindspore"], "mindspore", "the program has imported mindspore"),
        (["torch"], ["torch", "mindspore"], "torch-cpu", "the program has imported torch"),
        (["torch", "mindspore"], ["torch", "mindspore"], "torch-cpu", "imported torch and mindspore; set HYPER"),
        ([], ["mindspore"], "mindspore", "mindspore is the only framework installed"),
        ([], ["torch"], "torch-cpu", "torch is the only framework installed"),
        ([], ["torch", "mindspore"], "torch-cpu", "torch and mindspore are installed; set HYPER"),
    ],
)
def test_detection(
    in_program: list[str],
    installed: list[str],
    chosen: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in in_program:
        monkeypatch.setitem(sys.modules, name, imported(name))
    monkeypatch.setattr(registry, "_is_installed", lambda module: module in installed)
    with caplog.at_level("INFO", logger="hyper_parallel"):
        assert get_platform().name == chosen
        get_platform()
    assert [why in message for message in caplog.messages] == [True], caplog.messages


def test_a_framework_that_is_not_installed_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = registry._Backend("ghost", "no_such_package.platform:Ghost", "no_such_package")
    monkeypatch.setattr(registry, "_backends", {"ghost": ghost})
    assert available_platforms() == {"ghost": "no_such_package is not installed"}


def test_registering() -> None:
    register_platform("Mine", backend("mine", "cpu"), aliases=["my"])
    assert get_platform("my").name == "mine"
    assert available_platforms()["mine"] is None
    with pytest.raises(ValueError, match="registered already"):
        register_platform("mine", backend("mine", "cpu"))
    with pytest.raises(ValueError, match="'cpu'"):
        register_platform("other", backend("other", "cpu"), aliases=["cpu"])


def test_entry_points(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = ModuleType("someone_elses_package")
    module.Backend = backend("theirs", "cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = (
        EntryPoint("theirs", "someone_elses_package:Backend", registry.ENTRY_POINT_GROUP),
        EntryPoint("broken", "someone_elses_package:Missing", registry.ENTRY_POINT_GROUP),
        EntryPoint("torch-cpu", "someone_elses_package:Backend", registry.ENTRY_POINT_GROUP),
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    assert get_platform("theirs").name == "theirs"
    reasons = available_platforms()
    assert reasons["theirs"] is None
    assert "AttributeError" in str(reasons["broken"]) and "Missing" in str(reasons["broken"])
    assert "torch-cpu" in caplog.text and "ignored" in caplog.text


def test_platform_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in registry._backends.values():
        found.framework = found.name.partition("-")[0]
    monkeypatch.setattr(registry, "_is_installed", lambda module: True)
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "torch-cpu")
    assert get_platform_for_device("cpu") is get_platform()
    with pytest.raises(PlatformError, match="no GPU"):
        get_platform_for_device("cuda")
    registry._backends["torch-npu"].target = backend("torch-npu", "npu")
    assert get_platform_for_device("npu") is get_platform("torch-npu")
    with pytest.raises(ValueError, match=r"no device type 'tpu': use one of 'cpu'.*'npu'"):
        get_platform_for_device("tpu")


def test_platform_of_another_framework_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in registry._backends.values():
        found.framework = found.name.partition("-")[0]
    monkeypatch.setattr(registry, "_is_installed", lambda module: True)
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "mindspore")
    with pytest.raises(
        ValueError, match=r"'cuda': use one of 'cpu' \(platform 'mindspore'\), or leave the device type out"
    ):
        get_platform_for_device("cuda")


def test_the_contract_has_no_instances() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Platform()  # type: ignore[abstract]


def test_platforms_without_what_makes_them_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, there in (("torch-cpu", "0", False), ("mindspore", "1", True)):
        monkeypatch.setattr(registry._backends[name].target, "fast", Fast(), raising=False)
        monkeypatch.setenv(registry.FAST_VARIABLE, value)
        assert (get_platform(name).fast is not None) is there


def test_nothing_is_faster_unless_a_backend_says_so() -> None:
    module, x = object(), object()
    for answer in (
        NOTHING_FASTER.is_plain_linear(module),
        NOTHING_FASTER.norm_call(module),
        NOTHING_FASTER.linear_with_collective(x, x, LinearCollective("all_reduce", None, 2, 0, print)),
        NOTHING_FASTER.autograd_step(print, print),
        NOTHING_FASTER.autograd_pair(print, print),
        NOTHING_FASTER.linear_view(print, print, "key", print),
        NOTHING_FASTER.in_place_step(print, print),
        NOTHING_FASTER.can_delay_gradient(x),
        NOTHING_FASTER.fuses_linear,
    ):
        assert not answer
    for call in (NOTHING_FASTER.linear, NOTHING_FASTER.add_to_gradients):
        with pytest.raises(TypeError, match="Fast"):
            call(*(x,) * (3 if call == NOTHING_FASTER.linear else 2))


@pytest.mark.parametrize("raised", ["SystemExit(3)", "BaseException('x\\x1b')", "GeneratorExit()"])
def test_entry_points_that_exit(raised: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Failing entry points are listed as not available, and the others are there."""
    (tmp_path / "exits.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("exits", "exits:Platform", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (entry,))
    found = available_platforms()
    assert found["torch-cpu"] is None and str(found["exits"]).startswith(raised.partition("(")[0])
    assert str(found["exits"]).isprintable()
    registry._backends["exits"].framework = registry._backends["torch-cpu"].framework = "sys"
    get_platform("torch-cpu")
    monkeypatch.setattr(registry, "_selected", get_platform("torch-cpu"))
    with pytest.raises(ValueError, match="no device type 'none'"):
        get_platform_for_device("none")


def test_an_interrupt_ends_the_listing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    register_platform("interrupted", "interrupted:Platform", framework="sys")
    with pytest.raises(KeyboardInterrupt):
        available_platforms()
    registry._backends["torch-cpu"].framework = "sys"
    monkeypatch.setattr(registry, "_selected", get_platform("torch-cpu"))
    with pytest.raises(KeyboardInterrupt):
        get_platform_for_device("none")
