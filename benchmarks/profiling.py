"""The time of a step by its functions: ``python -m benchmarks.profiling mlp|llama|llama-sp|decode VERSION
[--backward]``."""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import warnings

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch-cpu")

import torch

from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.torch_groups import fake_group
from benchmarks.torch_versions import HYPER_PARALLEL, Version, llama_versions, mlp_versions

MODELS = {
    "mlp": lambda: mlp_versions(MlpSizes()),
    "llama": lambda: llama_versions(LlamaSizes()),
    "llama-sp": lambda: llama_versions(LlamaSizes(), sequence_parallel=True),
    "decode": lambda: llama_versions(LlamaSizes(), decode=True),
}


def _profile(version: Version, backward: bool, steps: int) -> pstats.Stats:
    run = version.forward_and_backward if backward else version.forward
    for _ in range(50):
        run()
        version.clear()
    profile = cProfile.Profile()
    for _ in range(steps):
        profile.enable()
        run()
        profile.disable()
        version.clear()
    return pstats.Stats(profile)


def main() -> None:
    """Print the functions that take most time by themselves. The profiler adds to each call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiling", description="Where a step's time goes.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("version", nargs="?", default=HYPER_PARALLEL, help="as tables name it")
    parser.add_argument("--backward", action="store_true", help="forward and backward, not forward alone")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=30)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with fake_group(4), torch.set_grad_enabled(arguments.model != "decode"):
        versions = {version.name: version for version in MODELS[arguments.model]()}
        if arguments.version not in versions:
            parser.error(f"no such version: {arguments.version}; there are {', '.join(versions)}")
        _profile(versions[arguments.version], arguments.backward, arguments.steps).sort_stats("tottime").print_stats(
            arguments.rows
        )


if __name__ == "__main__":
    main()
