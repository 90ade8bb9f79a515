"""Following the plain code of a model: the cost of the one forward that is followed.

    python -m benchmarks.cases.plain_code usual|followed

prints the microseconds of the first forward in this process, and the number of operations asked.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import hyper_parallel
from benchmarks.plans import llama_plan
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort, Step, interleaved, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_models import Blocks, rotary_tables
from hyper_parallel.core.plain_code.first_call import without_first_calls

__all__ = ["run"]

RANKS, LAYERS = 4, 8
USUAL, FOLLOWED = "usual", "followed"
#: Pairs of processes whose first forwards are compared.
PROCESSES = 5


@contextmanager
def _ways(sizes: LlamaSizes) -> Iterator[tuple[dict[str, Callable[[], None]], list[int]]]:
    """The forward of several blocks in each way, and the number of operations that were asked last."""
    asked = [0]
    with fake_group(RANKS), without_first_calls():
        mesh = hyper_parallel.init_device_mesh("cpu", (RANKS,))
        model = Blocks(sizes, LAYERS)
        for layer in model.layers:
            plan = llama_plan(hyper_parallel, sequence_parallel=False, dtensors=False)
            hyper_parallel.parallelize_module(layer, mesh, plan)
        x = torch.randn(sizes.batch, sizes.sequence, sizes.features)
        inputs = (x, *rotary_tables(sizes.sequence, sizes.head_size))
        check = hyper_parallel.check_plain_code

        def followed() -> None:
            with check(model) as checked:
                model(*inputs)
            assert not checked.findings, checked
            asked[0] = checked.asked

        yield {USUAL: lambda: model(*inputs), FOLLOWED: followed}, asked


def _first(way: str) -> tuple[int, int]:
    """The time of the first forward in a process of its own, in nanoseconds, and the number of operations asked."""
    printed = subprocess.run([sys.executable, "-m", __name__, way], check=True, capture_output=True, text=True).stdout
    nanoseconds, asked = map(int, printed.split())
    return nanoseconds, asked


def run(effort: Effort) -> Result:
    """The forward of several blocks, as it is and followed: the first of a process, and later ones."""
    sizes = LlamaSizes()
    result = Result(
        "plain_code",
        f"Forward of {LAYERS} Llama blocks ({sizes}), {RANKS} ranks of a fake process group, processor time. The first "
        "forward of a process has judged nothing before. Later ones find the verdicts on equal operations.",
    )
    with _ways(sizes) as (ways, asked):
        times = interleaved({name: Step(way) for name, way in ways.items()}, effort, time.process_time_ns)
    firsts = [(_first(USUAL)[0], *_first(FOLLOWED)) for _ in range(PROCESSES)]
    found = {
        f"{USUAL}, first of a process": [usual / 1e3 for usual, _, _ in firsts],
        f"{FOLLOWED}, first of a process": [followed / 1e3 for _, followed, _ in firsts],
        "more for each operation, first of a process": [(b - a) / n / 1e3 for a, b, n in firsts],
        f"{USUAL}, later": times[USUAL],
        f"{FOLLOWED}, later": times[FOLLOWED],
        f"more for each of {asked[0]} operations, later": [
            (b - a) / asked[0] for a, b in zip(times[USUAL], times[FOLLOWED], strict=True)
        ],
    }
    table = Table("forward", ["way", "microseconds"])
    table.rows = [[name, spread(values)] for name, values in found.items()]
    result.tables.append(table)
    more = sorted(found["more for each operation, first of a process"])
    result.goals.append(Goal("plain code: microseconds for each operation asked", more[len(more) // 2], 100.0))
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    with _ways(LlamaSizes()) as (WAYS, ASKED):
        BEGIN = time.process_time_ns()
        WAYS[sys.argv[1]]()
        print(time.process_time_ns() - BEGIN, ASKED[0])
