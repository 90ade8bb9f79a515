"""Write the report of a gate that has just run on real hardware: ``ci/hardware/<backend>-<device>.{json,md}``.

    make test PLATFORM=torch-cuda && .venv/torch-cuda/bin/python ci/hardware/report.py torch-cuda

Run it on the same machine, with the same interpreter, so that it asks the same framework as the gate. The report holds
the name of the device, versions, commit, date, numbers of tests and coverage. Commit it and run ``make readme-table``,
which shows it in the README. A row that ran on something else than hardware, or failed, is refused.

``--facts FILE`` takes the facts about the device from a JSON file in place of asking.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import results
from results import Row

__all__ = ["PROBES", "file_name", "make_report", "to_markdown"]

ROOT = Path(__file__).resolve().parents[2]
#: Devices that are hardware, as the gate's table calls them.
REAL = ("GPU", "NPU")
#: The facts about the device in every report.
FACTS = ("device name", "number of devices", "driver")
#: backend -> program that prints facts as JSON. It runs in a process of its own: this file knows no framework.
PROBES = {
    "torch-cuda": """
import json, torch
print(json.dumps({
    "device name": torch.cuda.get_device_name(0),
    "number of devices": torch.cuda.device_count(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
}))
""",
    "torch-npu": """
import json, torch, torch_npu
print(json.dumps({
    "device name": torch_npu.npu.get_device_name(0),
    "number of devices": torch_npu.npu.device_count(),
    "torch": torch.__version__,
    "torch_npu": torch_npu.__version__,
    "cann": torch_npu.npu.utils.get_cann_version(),
}))
""",
    "mindspore": """
import json, mindspore
print(json.dumps({
    "device name": mindspore.hal.get_device_name(0),
    "number of devices": mindspore.hal.device_count(),
    "mindspore": mindspore.__version__,
}))
""",
}
#: device -> the command that tells the version of the driver, and where in its output.
DRIVERS = {
    "GPU": (["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"(\S+)"),
    "NPU": (["npu-smi", "info"], r"npu-smi\s+(\S+)"),
}


def ask(row: Row) -> dict[str, str | int]:
    """The facts about this machine.

    Raises:
        SystemExit: when the framework does not answer.
    """
    done = subprocess.run([sys.executable, "-c", PROBES[row.backend]], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{sys.executable} cannot tell about the device of {row.backend}:\n{done.stderr}")
    facts = json.loads(done.stdout.splitlines()[-1])
    command, pattern = DRIVERS[row.device]
    try:
        printed = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except FileNotFoundError:
        printed = ""
    found = re.search(pattern, printed)
    return {"driver": found[1] if found else f"unknown: {command[0]} did not say", **facts}


def make_report(row: Row, facts: dict[str, str | int]) -> dict:
    """The report.

    Args:
        row: of the gate.
        facts: about the device, with at least `FACTS`.

    Raises:
        SystemExit: when the gate did not run on hardware or did not pass, or a fact is missing.
    """
    if row.device not in REAL:
        raise SystemExit(f"{row.name} is no run on hardware, so there is nothing to report")
    if row.verdict != "ok":
        raise SystemExit(f"{row.name} did not pass, so it is not reported: {row.verdict}")
    if row.partial:
        raise SystemExit(f"{row.name} is not reported: only some of its tests were asked for")
    if missing := [name for name in FACTS if name not in facts]:
        raise SystemExit(f"facts are missing: {', '.join(missing)}")
    facts = {"python": platform.python_version(), "machine": platform.machine(), **facts}
    return {"backend": row.backend, "device": row.device, "facts": facts, "row": asdict(row)}


def file_name(report: dict) -> str:
    """``torch-cuda-nvidia-h200`` for the files of a report."""
    device = re.sub(r"[^a-z0-9]+", "-", str(report["facts"]["device name"]).lower()).strip("-")
    return f"{report['backend']}-{device}"


def to_markdown(report: dict) -> str:
    """The report for people."""
    row = results.from_dict(report["row"])
    lines = [f"# {row.backend} on {report['facts']['device name']}", ""]
    lines += [f"* {name}: {value}" for name, value in report["facts"].items()]
    lines += [f"* commit: {row.commit}", f"* date: {row.date}", "", results.markdown([row])]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=sorted(PROBES), help="whose gate ran")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="JSON with the facts, in place of asking")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    arguments = parser.parse_args(argv)
    rows = results.read(arguments.root / "build" / "gate" / "table.json")
    row = next((row for row in rows if row.backend == arguments.backend), None)
    if row is None:
        raise SystemExit(f"the last run of the gates has no {arguments.backend}: run ci/{arguments.backend} first")
    if row.device not in REAL:
        make_report(row, {})  # says why not, before the framework is asked about a device that is not there
    report = make_report(row, json.loads(arguments.facts.read_text()) if arguments.facts else ask(row))
    folder = arguments.root / "ci" / "hardware"
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(report, indent=2) + "\n"), (".md", to_markdown(report))):
        path = folder / (file_name(report) + suffix)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
