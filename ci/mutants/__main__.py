"""Find which one-line changes of the code the gate notices, which the nightly run alone, and which no test.

    python -m ci.mutants [--count 200] [--seed 1] [--backend torch-cpu] [--gate-only]

Samples mutations of `hyper_parallel/core` and of the backends, runs the tests that reach each, the closest first, and
names those that survive. Outcomes are added to ``build/mutants/results.jsonl``: the same command goes on where it was
cut off. Each mutant is tried with torch-cpu, and with mindspore if it is in core and survived, or in that backend. The
tests of the gate come first. Mutants that survive them with every backend get all tests, as at night.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from queue import Queue

from ci.mutants import report
from ci.mutants.mutations import Mutation, sample
from ci.mutants.reach import BUILD, Reach, up_to_date
from ci.mutants.trial import Outcome, Place

#: Seconds that the tests of each round are estimated to take, and at most take with all around. A test that takes
#: longer than a round waits for the next.
ROUNDS = ((25.0, 60.0), (60.0, 150.0), (180.0, 420.0))
#: Tests that run the code in processes of their own, where nothing records the lines that they reach: for all that is
#: left.
UNRECORDED = ("tests/torch/test_costs.py::", "tests/mindspore/test_costs.py::")
#: So many mutations are tried before the tests that noticed them are run without any.
PART = 16
#: backend -> whether it tries a mutation of this file.
TRIES = {
    "torch-cpu": lambda path: "/platform/mindspore/" not in path,
    "mindspore": lambda path: "/platform/torch/" not in path,
}


class Trials:
    """The trials of one backend, in its gate or at ``night``.

    ``tests`` are those to be run; with none they are chosen for each mutation. ``sound`` are the tests that have passed
    in a place, with whatever mutation."""

    def __init__(
        self,
        root: Path,
        backend: str,
        reach: Reach,
        results: report.Results,
        tests: Sequence[str] = (),
        night: bool = False,
    ) -> None:
        self.root, self.backend, self.reach, self.results, self.tests = root, backend, reach, results, tests
        self.night = night
        self.sound: set[str] = set()
        self.unsound: set[str] = set()
        self.lock = threading.Lock()

    def run(self, mutations: list[Mutation], at_once: int) -> None:
        """Try mutations, ``at_once`` at a time, and add their outcomes to the results."""
        places: Queue[Place] = Queue()
        for number in range(at_once):
            places.put(Place(self.root, self.backend, number, self.night))
        # By parts, so that not much is in doubt when all this is cut off.
        for i in range(0, len(mutations), PART):
            todo = mutations[i : i + PART]
            while todo:
                self._run(todo, places, at_once)
                todo = self.doubted(todo, places)
        while not places.empty():
            places.get().close()

    def _run(self, mutations: list[Mutation], places: Queue[Place], at_once: int) -> None:
        def one(mutation: Mutation) -> None:
            place = places.get()
            try:
                started = time.monotonic()
                verdict, test, ran = self.attempt(place, mutation)
            finally:
                places.put(place)
            with self.lock:
                seconds = time.monotonic() - started
                self.results.add(mutation, self.backend, verdict, test, ran, seconds, self.night)

        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(one, mutation) for mutation in mutations]:
                future.result()

    def doubted(self, mutations: list[Mutation], places: Queue[Place]) -> list[Mutation]:
        """The mutations that were noticed only by a test that also fails without any: they are to be tried again."""
        noticed = {m: self.results.test_of(m, self.backend, self.night) for m in mutations}
        while suspects := sorted({test for test in noticed.values() if test} - self.sound - self.unsound):
            place = places.get()
            outcome = place.run(suspects, self.reach, time.monotonic() + 60 + 10 * len(suspects), len(suspects))
            places.put(place)
            self.sound.update(outcome.passed)
            if outcome.verdict == "passed":
                break
            self.unsound.add(outcome.test or suspects[0])
            print(f"{outcome.test} fails without a mutation: left out\n{outcome.log}", file=sys.stderr, flush=True)
        again = [m for m, test in noticed.items() if test in self.unsound]
        for mutation in again:
            self.results.add(mutation, self.backend, "doubted", "", 0, 0.0, self.night)
        return again

    def attempt(self, place: Place, mutation: Mutation) -> tuple[str, str, int]:
        """(verdict, the test that noticed, how many tests ran) for one mutation."""
        source = (self.root / mutation.path).read_text(encoding="utf-8")
        nightly = self.reach.nightly
        tests = [*self.tests] or [test for near in self.reach.rounds(mutation, source) for test in near]
        unrecorded = [test for test in self.reach.seconds if test.startswith(UNRECORDED) and test not in tests]
        unrecorded = [test for test in unrecorded if (test in nightly) == self.night]
        if self.night:  # tests of the gate once more, since some try more at night, but after those that it leaves out
            tests.sort(key=lambda test: test not in nightly)
        else:
            tests = [test for test in tests if test not in nightly]
        ran = 0
        place.mutate(mutation)
        try:
            for seconds, most in ROUNDS:
                if (seconds, most) == ROUNDS[-1]:
                    tests = unrecorded + tests
                chosen = self.chosen([test for test in tests if test not in self.unsound], seconds)
                if not chosen:
                    continue
                tests = [test for test in tests if test not in chosen]
                outcome = self.judged(place, mutation, chosen, time.monotonic() + most)
                if outcome.verdict != "passed":
                    return outcome.verdict, outcome.test, ran + len(outcome.passed) + 1
                ran += len(outcome.passed)
        finally:
            place.mutate(None, undo=mutation)
        return ("survived" if ran else "not reached"), "", ran

    def chosen(self, tests: list[str], seconds: float) -> list[str]:
        """The first tests that take so long together; those aside that alone take longer."""
        chosen, left = [], seconds
        for test in tests:
            if (takes := self.reach.seconds.get(test, 0.0)) > seconds:
                continue
            if (left := left - takes) < 0:
                break
            chosen.append(test)
        return chosen

    def judged(self, place: Place, mutation: Mutation, tests: list[str], deadline: float) -> Outcome:
        """Run tests; one that fails without the mutation too is not counted, now or later."""
        while tests:
            outcome = place.run(tests, self.reach, deadline)
            self.sound.update(outcome.passed)
            if outcome.verdict in ("passed", "failed"):
                return outcome  # whether the test fails without the mutation too, `doubted` asks of many at once
            # Without a test to blame, as when an import fails, any of them will show whether it is the mutation. A
            # hanging test may only be slow, on a machine that others use too.
            suspect = outcome.test or tests[0]
            place.mutate(None, undo=mutation)
            again = place.run([suspect], self.reach, time.monotonic() + 120)
            place.mutate(mutation)
            self.sound.update(again.passed)
            if again.verdict == "passed":
                return outcome
            self.unsound.add(suspect)
            print(f"{suspect} fails without a mutation: left out\n{again.log}", file=sys.stderr, flush=True)
            tests = [test for test in tests if test != suspect and test not in outcome.passed]
        return Outcome("passed")


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutations")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--backend", choices=sorted(TRIES), action="append", help="try with this one only")
    parser.add_argument("--at-once", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", default="", help="those in files whose path contains this")
    parser.add_argument("--tests", nargs="+", default=(), help="run these, as pytest takes them, and not those near")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    parser.add_argument("--gate-only", action="store_true", help="no nightly tests for those that the gate misses")
    parser.add_argument("--old-map", action="store_true", help="do not make the map anew when sources changed")
    parser.add_argument("--report", action="store_true", help="try nothing, sum up the outcomes so far")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the project")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    mutations = sample(root, arguments.count, arguments.seed)
    results = report.Results(root / BUILD / "results.jsonl")
    backends = () if arguments.report else arguments.backend or ("torch-cpu", "mindspore")
    reach_of = cache(lambda backend: up_to_date(root, backend, arguments.old_map, not arguments.gate_only))
    for night, backend in product((False,) if arguments.gate_only else (False, True), backends):
        reach = reach_of(backend)
        wanted = (m for m in mutations if TRIES[backend](m.path) and arguments.only in m.path)
        todo = [m for m in wanted if results.is_open(m, backend, arguments.again, night)]
        # A mutation that one backend noticed needs no other one; those that only this backend can notice come first.
        todo.sort(key=lambda m: "/core/" in m.path)
        print(f"{backend}{' at night' if night else ''}: {len(todo)} mutants", flush=True)
        Trials(root, backend, reach, results, arguments.tests, night).run(todo, arguments.at_once)
    summary = report.summary(results, mutations, arguments.seed)
    report.write(root, summary)
    print(report.text(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
