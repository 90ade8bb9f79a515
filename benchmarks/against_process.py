"""The side of `benchmarks.against` that measures: ``python -m benchmarks.against_process``, one for each commit.

Prints the names of the steps that it can time as one line of JSON. For each name that it reads, it then prints the
microseconds of one turn, one line each. It stops at the end of its input.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from benchmarks import machine
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.timing import Step, Turns, frozen, no_collection
from benchmarks.torch_groups import fake_group
from benchmarks.torch_passes import FORWARD, FORWARD_AND_BACKWARD, step_of
from benchmarks.torch_versions import HYPER_PARALLEL, Version, llama_versions, mlp_versions

RANKS = 4
TURN = 0.01


def steps() -> dict[str, Step]:
    """The steps to time: the default plans of the benchmark's cases `mlp` and `llama`."""
    models = {
        "MLP": mlp_versions(MlpSizes()),
        "Llama block": llama_versions(LlamaSizes()),
        "Llama block, sequence parallel": llama_versions(LlamaSizes(), sequence_parallel=True),
    }
    return {
        f"{model}: {name}": step_of(_ours(versions), name)
        for model, versions in models.items()
        for name in (FORWARD, FORWARD_AND_BACKWARD)
    }


def _ours(versions: list[Version]) -> Version:
    return next(version for version in versions if version.name == HYPER_PARALLEL)


def main() -> None:
    """Answer until the other side closes the pipe."""
    warnings.simplefilter("ignore")
    machine.pin()
    with fake_group(RANKS):
        turns = {name: Turns(step, TURN, time.process_time_ns) for name, step in steps().items()}
        print(json.dumps(list(turns)), flush=True)
        with frozen():
            for line in sys.stdin:
                with no_collection():
                    print(turns[line.rstrip("\n")].take(), flush=True)


if __name__ == "__main__":
    main()
