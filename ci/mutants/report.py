"""The outcomes of the trials: kept line by line while they run, and summed up in ``ci/last_mutants.json``."""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from ci.mutants.mutations import Mutation

LAST = Path("ci") / "last_mutants.json"
NOTICED = ("failed", "hung", "broken")
#: The verdict on a mutation that no gate noticed, and a nightly run did.
AT_NIGHT = "noticed at night"
ALIVE = ("survived", "not reached")


class Results:
    """The file of results. The last entry of a mutation and a backend counts, of its gate and of its nightly run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[tuple[str, bool], dict[str, Any]]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        self.entries.setdefault(entry["key"], {})[entry["backend"], entry.get("night", False)] = entry

    def add(
        self, mutation: Mutation, backend: str, verdict: str, test: str, ran: int, seconds: float, night: bool = False
    ) -> None:
        """Add the outcome of a trial, and print it."""
        entry = {
            "key": mutation.key,
            "backend": backend,
            "night": night,
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

    def is_open(self, mutation: Mutation, backend: str, again: bool, night: bool = False) -> bool:
        """Return whether this backend has to try a mutation, which no gate has noticed so far.

        It has not tried it, or is to do so ``again``. At night, no nightly run has noticed it either."""
        once = self._of(mutation, backend, night).get("verdict", "doubted") != "doubted"
        noticed = (*NOTICED, AT_NIGHT) if night else NOTICED
        return self.verdict(mutation) not in noticed and (not once or again)

    def _of(self, mutation: Mutation, backend: str, night: bool) -> dict[str, Any]:
        return self.entries.get(mutation.key, {}).get((backend, night), {})

    def test_of(self, mutation: Mutation, backend: str, night: bool = False) -> str:
        """The test that noticed it with this backend, if one did."""
        entry = self._of(mutation, backend, night)
        return entry["test"] if entry.get("verdict") == "failed" else ""

    def at_night(self, mutation: Mutation) -> list[dict[str, Any]]:
        """The entries of nightly runs that tried it."""
        entries = self.entries.get(mutation.key, {}).items()
        return [entry for (_, night), entry in entries if night and entry["verdict"] != "doubted"]

    def verdict(self, mutation: Mutation) -> str:
        """Return how the gate noticed it, else "noticed at night", "survived", "not reached" or "not tried"."""
        tried = self.entries.get(mutation.key, {}).items()
        verdicts = {AT_NIGHT if night and e["verdict"] in NOTICED else e["verdict"] for (_, night), e in tried}
        for verdict in (*NOTICED, AT_NIGHT, *ALIVE):
            if verdict in verdicts:
                return verdict
        return "not tried"


def summary(results: Results, mutations: list[Mutation], seed: int) -> dict[str, Any]:
    """Return numbers, the mutants that nightly runs alone notice, and the survivors."""
    verdicts = {mutation: results.verdict(mutation) for mutation in mutations}
    count = {name: list(verdicts.values()).count(name) for name in (*NOTICED, AT_NIGHT, *ALIVE, "not tried")}
    ordered = sorted(mutations, key=lambda m: (m.path, m.line))
    alive = [m for m in ordered if verdicts[m] in ALIVE]
    late = [(m, e) for m in ordered if verdicts[m] == AT_NIGHT for e in results.at_night(m) if e["verdict"] in NOTICED]
    return {
        "seed": seed,
        "mutants": len(mutations),
        "noticed by the gate": sum(count[name] for name in NOTICED),
        "not tried at night": sum(not results.at_night(m) for m in alive),
        "verdicts": count,
        "at night alone": [{**_entry(m, e["verdict"]), "test": e["test"]} for m, e in late],
        "survivors": [{**_entry(m, verdicts[m]), "why": ""} for m in alive],
    }


def _entry(mutation: Mutation, verdict: str) -> dict[str, Any]:
    return {
        "where": mutation.path,
        "line": mutation.line,
        "text": mutation.text,
        "change": f"{mutation.before} -> {mutation.after}",
        "kind": mutation.kind,
        "verdict": verdict,
        "key": mutation.key,
    }


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
    """Return numbers, mutants that nightly runs alone notice, and survivors, for a person."""
    numbers = ", ".join(f"{n} {name}" for name, n in found["verdicts"].items() if n)
    by_gate = f"{found['noticed by the gate']} noticed by the gate"
    lines = [f"{found['mutants']} mutants of seed {found['seed']}, {by_gate}: {numbers}"]
    if untried := found["not tried at night"]:
        lines.append(f"not tried at night: {untried} of those alive")
    for mutant in (*found["at night alone"], *found["survivors"]):
        how = f"at night {mutant['verdict']}" if "test" in mutant else mutant["verdict"]
        lines.append(f"\n{mutant['where']}:{mutant['line']} ({mutant['kind']}, {how})")
        lines.append(f"    {mutant['text']}\n    {mutant['change']}")
        if more := mutant.get("test") or mutant.get("why"):
            lines.append(f"    {more}")
    return "\n".join(lines)
