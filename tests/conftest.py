"""Fixtures for all tests, and which folders belong to which backend."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.testing.extent import everything, keep_the_gate
from hyper_parallel.testing.pool import SIZE, WorkerPool
from tests.simulated_npu import preload

# The checks that tests/conformance collects: a failed assert in them shows its operands, as in a file of tests.
pytest.register_assert_rewrite("hyper_parallel.testing.comparisons", "hyper_parallel.testing.conformance")

PLATFORM = os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch-cpu")

# Folders that speak about some backends only; everything else is for all.
PLATFORMS_OF = {
    "torch": ("torch-cpu", "torch-cuda", "torch-npu"),
    "mindspore": ("mindspore",),
    "npu": ("torch-npu",),
    "cuda": ("torch-cuda",),
    "fake_cuda": ("torch-cuda",),
}
# Files of tests/torch that test the CPU, or features that are the same on every device and take long to try.
ON_CPU_ONLY = {
    "test_against_torch.py": "the behaviour of torch's own DTensor",
    "test_checkpoint.py": "optimizers of plain modules on the CPU, and a rank that gloo loses",
    "test_checkpoint_crashes.py": "the contents of files, whichever device the tensors come from",
    "test_docstrings.py": "examples with a mesh of CPUs",
    "test_faults.py": "how gloo fails",
    "test_forward_writes.py": "training in float64, which not every device has",
    "test_fully_shard_overlap.py": "which collectives gloo starts, and when",
    "test_fully_shard_pairs.py": "pairs of options in float64, which not every device has",
    "test_fully_shard_training.py": "every optimizer in float64, which not every device has",
    "test_gpu_bodies.py": "the jobs of tests/cuda, where there is no GPU",
    "test_huggingface.py": "models of a library",
    "test_huggingface_files.py": "models of a library",
    "test_nested_parameters.py": "every optimizer in float64, which not every device has",
    "test_operator_table.py": "every operator, with torch's samples on the CPU",
    "test_optimizer_matrix.py": "every optimizer in float64, which not every device has",
    "test_pages.py": "programs of the documentation, for CPUs",
    "test_pictures.py": "pictures, whichever device draws",
    "test_replicate.py": "optimizers in float64, which not every device reduces",
    "test_replicate_features.py": "float64, and layers that simulated NPUs have no kernels for",
    "test_stays_unsharded.py": "training in float64, which not every device has",
    "test_styles_against_torch.py": "torch's own styles with gloo",
    "test_trainer.py": "training in float64, which not every device has",
    "test_walks.py": "functions that run with gloo",
    "test_without_samples.py": "layers in float64, which not every device has",
    "test_vocabulary.py": "ids outside a vocabulary, which are an error on the CPU only",
}
#: Those of them that simulated NPUs run all the same: torch's own DTensor over HCCL is a reference too.
ALSO_ON_NPU = {"test_against_torch.py", "test_huggingface.py"}
#: Files of tests/torch that would repeat their results of the CPU on a simulated NPU, which computes on the CPU, and
#: take long. Real devices run them.
NOT_SIMULATED = {
    "test_clipping.py": "norms over several meshes",
    "test_compile_guards.py": "causes of recompilation by torch; test_compile.py is run",
    "test_compile_models.py": "more models; test_compile.py is run",
    "test_compile_uneven.py": "more layouts; test_compile.py is run",
    "test_costs_against_torch.py": "numbers of messages",
    "test_dry_run.py": "worlds without devices",
    "test_fuzz_finds.py": "whether random programs find planted bugs",
    "test_huggingface_zoo.py": "models of a library; test_huggingface.py is run",
    "test_patches.py": "the patches in torch",
    "test_rules_page.py": "a page",
}
#: Tests that the gate leaves to the nightly run on simulated NPUs, which compute on the CPU: name of a file, or of a
#: test in it -> why the gate of torch-cpu, on the same code, is enough.
_FILES = "files of checkpoints, whichever device the tensors come from; test_checkpoint_state.py is run"
_UNITS = "further uses of fully_shard; test_fully_shard.py, _units, _steps, _2d, _batches and _methods are run"
NIGHTLY_ON_SIMULATED_NPU = {
    "test_against_torch.py": "torch's own DTensor, whose sums are those of the CPU here",
    "test_checkpoint.py": _FILES,
    "test_checkpoint_damage.py": _FILES,
    "test_checkpoint_pretrained.py": _FILES,
    "test_checkpoint_fuzz.py": _FILES,
    "test_checkpoint_memory.py": _FILES,
    "test_checkpoint_pipes.py": _FILES,
    "test_checkpoint_pretrained_crashes.py": _FILES,
    "test_checkpoint_state_dict.py": _FILES,
    "test_checkpoint_sums.py": _FILES,
    "test_checkpoint_two_jobs.py": _FILES,
    "test_checkpoint_tool.py": _FILES,
    "test_checkpoint_state.py::test_random_states_of_another_number_of_ranks": _FILES,
    "test_checkpoint_state.py::test_two_dimensions": _FILES,
    "test_checkpoint_state.py::test_what_each_rank_has": _FILES,
    "test_expert_checkpoint.py": _FILES,
    "test_compile.py::test_decoder": "a larger model; test_mlp is run",
    "test_compile.py::test_inside_of_units": "more models; test_mlp is run",
    "test_compile.py::test_outside": "operations that leave compiled code",
    "test_compile.py::test_styles": "more styles; test_mlp is run",
    "test_compile.py::test_ways": "more ways to compile; test_mlp is run",
    "test_compile_depth.py": "stacks of blocks; test_compile.py is run",
    "test_compile_styles.py": "more styles; test_compile.py is run",
    "test_costs.py": "numbers of messages",
    "test_data_parallel_random.py": "random trainers; the files of fully_shard and replicate are run",
    "test_empty_shards.py::test_second_order_of_empty_shards": "second order; test_gradients.py is run",
    "test_expert_training.py": "experts under data parallelism; test_experts.py and test_fully_shard.py are run",
    "test_extremes.py": "numbers at the ends of their ranges, which the CPU computes",
    "test_fully_shard_against_torch.py": "torch's own fully_shard",
    "test_fully_shard_around.py": _UNITS,
    "test_fully_shard_bytes.py": _UNITS,
    "test_fully_shard_uses.py": _UNITS,
    "test_fuzz.py": "random programs, of operations that have tests here",
    "test_huggingface.py": "models of a library",
    "test_huggingface_blocks.py": "models of a library",
    "test_huggingface_sequences.py": "models of a library",
    "test_huggingface_trainer.py": "a trainer of a library",
    "test_large_plans.py": "plans of many keys",
    "test_launch.py": "variables of launchers",
    "test_long_models.py": "models; test_long_sequences.py is run",
    "test_other_programs.py": "programs; tests/npu starts some",
    "test_own_style.py": "a program of the documentation",
    "test_random_states.py": "files of random states; test_random.py is run",
    "test_readme.py": "programs of the README; tests/npu starts programs",
    "test_second_order.py": "gradients of gradients, by the same functions of torch",
    "test_torch_fully_shard.py::test_two_steps": "all styles under torch's own fully_shard; the other tests are run",
    "test_training_job.py": "a program of the documentation",
    "test_training_features.py": "features of training loops around the library",
    "test_units_by_choice.py": _UNITS,
}
#: Tests that the gate leaves to the nightly run on MindSpore, where each takes seconds: as `NIGHTLY_ON_SIMULATED_NPU`,
#: or with a row in brackets. Other rows of the same test are run.
_ROWS = "a further row; other rows are run"
NIGHTLY_ON_MINDSPORE = {
    "test_checkpoint.py::test_optimizers[Adagrad]": _ROWS,
    "test_checkpoint.py::test_optimizers[RMSProp]": _ROWS,
    "test_checkpoint.py::test_optimizers[experimental SGD]": _ROWS,
    "test_checkpoint.py::test_training_goes_on[buffered]": _ROWS,
    "test_checkpoint.py::test_training_goes_on[even]": _ROWS,
    "test_checkpoint.py::test_training_goes_on[packed]": _ROWS,
    "test_checkpoint.py::test_training_goes_on[uneven]": _ROWS,
    "test_checkpoint_state.py::test_two_dimensions": "test_checkpoint.py has meshes of two dimensions",
    "test_checkpoint_state_dict.py::test_to_another_model[buffered]": _ROWS,
    "test_checkpoint_state_dict.py::test_to_another_model[even]": _ROWS,
    "test_checkpoint_state_dict.py::test_to_another_model[packed]": _ROWS,
    "test_checkpoint_state_dict.py::test_to_another_model[tied]": _ROWS,
    "test_expert_training.py::test_training[dp = rest x ep, replicated]": _ROWS,
    "test_extremes.py::test_nan_is_kept[(2, 2)-max]": _ROWS,
    "test_extremes.py::test_ties_share_the_gradient[(2, 2)-min]": _ROWS,
    "test_fully_shard_2d.py::test_block[tensor-uneven]": _ROWS,
    "test_fully_shard_2d.py::test_three_dimensions[uneven-three]": _ROWS,
    "test_fully_shard_arguments.py::test_fewer_ranks[2-1-(8, 12)]": _ROWS,
    "test_fully_shard_arguments.py::test_several_modules[3-None]": _ROWS,
    "test_loaded_values.py::test_ways[5-rows]": _ROWS,
    "test_redistribute.py::test_two_dimensional_mesh[0-(8, 12)]": _ROWS,
    "test_redistribute.py::test_two_dimensional_mesh[1-(8, 12)]": _ROWS,
    "test_redistribute.py::test_two_dimensional_mesh[2-(8, 12)]": _ROWS,
    "test_redistribute.py::test_two_dimensional_mesh[3-(8, 12)]": _ROWS,
    "test_redistribute_options.py::test_another_mesh[(8, 4)]": _ROWS,
    "test_second_order.py::test_leaf[(2, 2)-uneven]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-both-linear-even]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-colwise-linear-even]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-rowwise-embedding-even]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-rowwise-linear-even]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-whole-linear-even]": _ROWS,
    "test_style_matrix.py::test_every_layout[3-whole-norm-even]": _ROWS,
    "test_views.py::test_moved_views_keep_their_order[2-(6, 6)]": _ROWS,
}
#: Files of tests/torch that no NPU can run.
NOT_ON_NPU = {"test_flex_attention.py": "an operator that torch refuses on NPUs"}
#: Tests that ranks that share a GPU cannot run, since they talk over gloo: name of a file, or of a test in it -> why.
_FUNCTIONAL = "over gloo, functional collectives of torch on a GPU end the process (segmentation fault, torch 2.15)"
NEEDS_NCCL = {
    "test_comm_mode_torch.py::test_counted": _FUNCTIONAL,
    "test_compile.py": _FUNCTIONAL,
    "test_compile_guards.py": _FUNCTIONAL,
    "test_compile_models.py": _FUNCTIONAL,
    "test_compile_styles.py": _FUNCTIONAL,
    "test_compile_uneven.py": _FUNCTIONAL,
    "test_loss_parallel_torch.py::test_against_torch": _FUNCTIONAL,
    "test_loss_parallel_torch.py::test_narrow_dtypes": _FUNCTIONAL,
    "test_mesh_against_torch.py::test_functional_collectives": _FUNCTIONAL,
    "test_torch_bridge.py::test_round_trip": _FUNCTIONAL,
    "test_torch_bridge.py::test_gradients_through_both": _FUNCTIONAL,
    "test_torch_bridge.py::test_clipping_on_several_meshes": _FUNCTIONAL,
    "test_torch_fully_shard.py": _FUNCTIONAL,
    "test_fully_shard_against_torch.py::test_alike": _FUNCTIONAL,
    "test_distributed_checkpoint.py::test_broadcast_onto_meta": "torch takes the CPU for the device of a group of gloo",
    "test_native_collectives.py::test_functions": "over gloo, sending a tensor of a GPU ends the process (torch 2.15)",
    "test_native_collectives.py::test_data_parallel_loop": "gloo coalesces no collectives of tensors of a GPU",
    "test_mesh_groups.py::test_other_backends": "it asks for groups of nccl",
}
KNOWN = sorted({platform for platforms in PLATFORMS_OF.values() for platform in platforms})

# Read when the frameworks are loaded, here and in the workers: ranks share few cores, and MindSpore warns a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")
# Following the first call of each model takes more than 3 % of the gate's time: tests about it turn it on.
if not everything():
    os.environ.setdefault("HYPER_PARALLEL_CHECK", "0")


def pytest_configure() -> None:
    """Refuse a platform that no folder knows: it would run next to nothing and pass. Let ranks share few GPUs."""
    if PLATFORM not in KNOWN:
        raise pytest.UsageError(f"HYPER_PARALLEL_PLATFORM={PLATFORM!r}: tests know {', '.join(KNOWN)}")
    if PLATFORM == "torch-cuda":
        import torch

        if 0 < torch.cuda.device_count() < SIZE:
            # Read by the workers, and by programs that tests start. nccl refuses two ranks on one GPU. From 2.30 on,
            # with NCCL_MULTI_RANK_GPU_ENABLE=1, it takes 14 ms a collective of 4 ranks (MPS: 0.13 ms, gloo: 1.2 ms).
            os.environ.setdefault("HYPER_PARALLEL_TORCH_BACKEND", "gloo")
        # cuDNN's convolutions keep 10 bits of the mantissa by default: shards would differ by more than rounding.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests of other backends. It is not reported as skipped: their own run reports it."""
    here = Path(__file__).parent
    if collection_path.parent.parent == here and f"{collection_path.parent.name}/{collection_path.name}" in left_out():
        return True
    is_folder_of_tests = collection_path.parent == here
    return True if is_folder_of_tests and PLATFORM not in PLATFORMS_OF.get(collection_path.name, KNOWN) else None


def left_out() -> set[str]:
    """Files in folders of the backend under test that it does not run, as ``torch/test_a.py``."""
    if PLATFORM == "mindspore":
        # An environment of MindSpore alone cannot compare it with torch.
        return set() if importlib.util.find_spec("torch") else {"mindspore/test_across_frameworks.py"}
    names = set() if PLATFORM == "torch-cpu" else set(ON_CPU_ONLY)
    if PLATFORM == "torch-npu":
        not_simulated = NOT_SIMULATED.keys() if preload.is_simulated() else set()
        names = (ON_CPU_ONLY.keys() - ALSO_ON_NPU) | NOT_ON_NPU.keys() | not_simulated
    return {f"torch/{name}" for name in names}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly tests to the nightly run. Skip `NEEDS_NCCL` where several ranks share a GPU."""
    nightly: dict[str, str] = {}
    if PLATFORM == "torch-npu" and preload.is_simulated():
        nightly = NIGHTLY_ON_SIMULATED_NPU
    elif PLATFORM == "mindspore":
        nightly = NIGHTLY_ON_MINDSPORE
    for item in items:
        if _named(item, nightly):
            item.add_marker(pytest.mark.nightly)
    keep_the_gate(config, items)
    if PLATFORM == "torch-cuda" and os.environ.get("HYPER_PARALLEL_TORCH_BACKEND") == "gloo":
        for item in items:
            if reason := _named(item, NEEDS_NCCL):
                item.add_marker(pytest.mark.skip(reason=reason))


def _named(item: pytest.Item, reasons: dict[str, str]) -> str | None:
    """The reason that a table gives for a row of a test, for the test, or for its file."""
    names = (f"{item.path.name}::{name}" for name in (item.name, getattr(item, "originalname", item.name)))
    return next(filter(None, map(reasons.get, (*names, item.path.name))), None)


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[None]:
    """Pause the measurement of coverage. For tests that read source files, or run lines that other tests reach."""
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)


@pytest.fixture(scope="session")
def platform_name() -> str:
    """Name of the backend under test."""
    return PLATFORM


@pytest.fixture(scope="session")
def pool(platform_name: str) -> Iterator[WorkerPool]:
    """Worker processes of the backend under test."""
    with WorkerPool(platform_name, first="tests.support.measured_ranks:leave_the_rest") as workers:
        yield workers
