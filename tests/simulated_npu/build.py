"""Compiling the stand-in for CANN, and finding out whether it can be used here."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.simulated_npu import preload

SOURCES = Path(__file__).parent / "cann"
BUILDS = Path(__file__).resolve().parents[2] / "build" / "simulated_npu"
FLAGS = ["-O2", "-g", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Werror"]
#: The releases of torch_npu whose calls are known to be covered; the gate runs the last.
TESTED_VERSIONS = ("2.13.0", "2.14.0")

# The files of each library. torch_npu asks for each of them by name.
RUNTIME = ["device.c", "memory.c", "stream.c", "operators.c", "accepted_calls.c"]
HCCL = ["hccl_communicator.c", "hccl_reduce.c", "hccl_collectives.c", "hccl_point_to_point.c"]
EMPTY = ["ge_runner", "graph", "acl_tdt_channel", "atb", "hcomm"]

# Functions of CANN among the symbols that torch_npu wants from elsewhere.
_OF_CANN = re.compile(r"(acl|Hccl|Hcom|rt[A-Z]|Msprof|_ZNK?3atb|_ZNK?2ge)\w+$")


def unavailable_reason() -> str | None:
    """Why the simulated NPU cannot run here, as a sentence for a person, or None when it can."""
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install gcc, which compiles the stand-in for CANN"
    if importlib.util.find_spec("torch_npu") is None:
        newest = TESTED_VERSIONS[-1]
        return f"torch_npu is not installed: install platform/torch-npu/requirements.txt (torch-npu {newest})"
    if version("torch-npu").split("+")[0] not in TESTED_VERSIONS:
        return f"torch_npu is {version('torch-npu')}, the stand-in for CANN fits {' and '.join(TESTED_VERSIONS)}"
    return None


def wheel() -> Path:
    """The folder of the installed torch_npu, found without importing it."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def symbols(file: Path, *, defined: bool) -> set[str]:
    """Names of the functions that a library has, or wants from others."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only" if defined else "--undefined-only", file],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}


def calls_of_wheel() -> set[str]:
    """Functions of CANN that torch_npu links against: it does not load unless all of them are there."""
    files = [*wheel().glob("lib/*.so"), *wheel().glob("_C.*.so")]
    return {name for file in files for name in symbols(file, defined=False) if _OF_CANN.match(name)}


def accepted_calls() -> dict[str, str]:
    """Functions that do nothing but succeed, with the reason."""
    text = (SOURCES / "accepted_calls.def").read_text()
    return dict(re.findall(r'^ACCEPTED\((\w+), "(.*)"\)$', text, re.MULTILINE))


def emulated_calls(folder: Path) -> set[str]:
    """Functions of CANN that the libraries in ``folder`` emulate, those that only succeed left out."""
    found = symbols(folder / "libascendcl.so", defined=True) | symbols(folder / "libhccl.so", defined=True)
    return {name for name in found if _OF_CANN.match(name)} - set(accepted_calls())


def build() -> Path:
    """Compile the libraries, unless they are there already, and return their folder.

    Raises:
        RuntimeError: with the compiler's words, or when the simulated NPU cannot run here.
    """
    reason = unavailable_reason()
    if reason:
        raise RuntimeError(f"no simulated NPU: {reason}")
    digest = hashlib.sha256(version("torch-npu").encode())
    for file in [Path(__file__), *sorted(SOURCES.iterdir())]:
        digest.update(file.read_bytes())
    folder = BUILDS / digest.hexdigest()[:16]
    if not folder.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        # Made next to it and renamed, so that another process finds all of it or nothing.
        with tempfile.TemporaryDirectory(dir=BUILDS) as made:
            _compile_all(Path(made))
            try:
                shutil.copytree(made, f"{made}-done")
                Path(f"{made}-done").rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def _compile_all(folder: Path) -> None:
    headers = wheel() / "include" / "third_party" / "acl" / "inc"
    _compile(folder, "ascendcl", [SOURCES / name for name in RUNTIME], ["-I", str(headers), "-lpthread"])
    _compile(folder, "hccl", [SOURCES / name for name in HCCL], ["-lrt"], needs="ascendcl")
    _compile(folder, preload.BESIDE_CUDA, [SOURCES / f"{preload.BESIDE_CUDA}.c"], [])
    for name in EMPTY:
        empty = folder / f"{name}.c"
        empty.write_text(f"int simulated_{name};\n")
        _compile(folder, name, [empty], [], needs="hccl" if name == "hcomm" else "ascendcl")
    missing = calls_of_wheel() - emulated_calls(folder) - set(accepted_calls())
    source = folder / "not_emulated.c"
    source.write_text('#include "not_emulated.h"\n' + "".join(f"NOT_EMULATED({name})\n" for name in sorted(missing)))
    _compile(folder, "acl_op_compiler", [source], ["-I", str(SOURCES)], needs="ascendcl")


def _compile(folder: Path, name: str, sources: Iterable[Path], options: list[str], needs: str = "") -> None:
    """Make one library. torch_npu looks functions up in a library and in those that it needs."""
    library = f"lib{name}.so"
    linked = ["-Wl,--no-as-needed", f"-L{folder}", f"-l{needs}"] if needs else []
    command = ["gcc", *FLAGS, f"-Wl,-soname,{library}", "-o", str(folder / library), *map(str, sources)]
    done = subprocess.run([*command, *options, *linked], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"gcc cannot build {library} of the simulated NPU:\n{done.stderr}")
