"""What came out of the trials: kept line by line while they run, and summed up in ``ci/last_mutants.json``."""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from ci.mutants.mutations import Mutation

LAST = Path("ci") / "last_mutants.json"
NOTICED = ("failed", "hung", "broken")


class Results:
    """The file of results. The last entry of a mutation and a backend counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        self.entries.setdefault(entry["key"], {})[entry["backend"]] = entry

    def add(self, mutation: Mutation, backend: str, verdict: str, test: str, ran: int, seconds: float) -> None:
        """Add what came out of a trial, and print it."""
        entry = {
            "key": mutation.key,
            "backend": backend,
            "verdict": verdict,
            "test": test,
            "ran": ran,
            "seconds": round(seconds, 1),
            "mutation": mutation.as_dict(),
        }
        self._take(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(entry), file=file)
        change = f"{mutation.before} -> {mutation.after}"
        print(f"{verdict:<11} {seconds:5.1f} s  {mutation.path}:{mutation.line}  {change}  {test}", flush=True)

    def is_open(self, mutation: Mutation, backend: str, again: bool) -> bool:
        """Whether a mutation has to be tried: nobody noticed it so far, and this backend has not tried it, or is to try
        it once more."""
        tried = self.entries.get(mutation.key, {})
        once = backend in tried and tried[backend]["verdict"] != "doubted"
        return self.verdict(mutation) not in NOTICED and (not once or again)

    def test_of(self, mutation: Mutation, backend: str) -> str:
        """The test that noticed it with this backend, if one did."""
        entry = self.entries.get(mutation.key, {}).get(backend, {})
        return entry["test"] if entry.get("verdict") == "failed" else ""

    def verdict(self, mutation: Mutation) -> str:
        """How it was noticed, else "survived", "not reached" by any test, or "not tried"."""
        verdicts = [entry["verdict"] for entry in self.entries.get(mutation.key, {}).values()]
        for verdict in (*NOTICED, "survived", "not reached"):
            if verdict in verdicts:
                return verdict
        return "not tried"


def summary(results: Results, mutations: list[Mutation], seed: int) -> dict[str, Any]:
    """Numbers, and the survivors."""
    verdicts = {mutation: results.verdict(mutation) for mutation in mutations}
    count = {name: list(verdicts.values()).count(name) for name in (*NOTICED, "survived", "not reached", "not tried")}
    alive = [m for m, verdict in verdicts.items() if verdict in ("survived", "not reached")]
    survivors = [
        {
            "where": m.path,
            "line": m.line,
            "text": m.text,
            "change": f"{m.before} -> {m.after}",
            "kind": m.kind,
            "verdict": verdicts[m],
            "key": m.key,
            "why": "",
        }
        for m in sorted(alive, key=lambda m: (m.path, m.line))
    ]
    return {"seed": seed, "mutants": len(mutations), "verdicts": count, "survivors": survivors}


def write(root: Path, found: dict[str, Any]) -> None:
    """Write ``ci/last_mutants.json``. Why a survivor does not matter is written there by hand, and kept."""
    path = root / LAST
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    reasons = {survivor["key"]: survivor["why"] for survivor in before.get("survivors", ())}
    for survivor in found["survivors"]:
        survivor["why"] = reasons.get(survivor["key"], "")
    command = ["git", "describe", "--always", "--dirty=+changes"]
    commit = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True).stdout.strip()
    stamped = {"date": date.today().isoformat(), "commit": commit, **found}
    path.write_text(json.dumps(stamped, indent=2) + "\n", encoding="utf-8")


def text(found: dict[str, Any]) -> str:
    """For a person: numbers and survivors."""
    numbers = ", ".join(f"{n} {name}" for name, n in found["verdicts"].items() if n)
    lines = [f"{found['mutants']} mutants of seed {found['seed']}: {numbers}"]
    for survivor in found["survivors"]:
        lines.append(f"\n{survivor['where']}:{survivor['line']} ({survivor['kind']}, {survivor['verdict']})")
        lines.append(f"    {survivor['text']}\n    {survivor['change']}")
        if survivor["why"]:
            lines.append(f"    {survivor['why']}")
    return "\n".join(lines)
