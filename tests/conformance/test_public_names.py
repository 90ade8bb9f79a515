"""Every public name resolves, from `hyper_parallel` and from the paths that users of such libraries already have."""

from __future__ import annotations

import importlib

import pytest

import hyper_parallel

PATHS = {
    "hyper_parallel.platform": ["get_platform", "register_platform", "available_platforms", "Platform"],
    "hyper_parallel.core.mesh.device_mesh": ["DeviceMesh", "init_device_mesh"],
    "hyper_parallel.core.dtensor.dtensor": ["DTensor", "distribute_tensor", "distribute_module"],
    "hyper_parallel.core.layouts.placement_types": ["Placement", "Shard", "Replicate", "Partial"],
    "hyper_parallel.core.tensor_parallel.style": [
        "ParallelStyle",
        "ModuleStyle",
        "ColwiseParallel",
        "RowwiseParallel",
        "SequenceParallel",
        "PrepareModuleInput",
        "PrepareModuleOutput",
        "PrepareModuleInputOutput",
    ],
    "hyper_parallel.core.tensor_parallel.api": ["parallelize_module"],
    "hyper_parallel.core.tensor_parallel": [
        "ParallelStyle",
        "ModuleStyle",
        "ColwiseParallel",
        "RowwiseParallel",
        "SequenceParallel",
        "HeadNormParallel",
        "NoParallel",
        "ParameterParallel",
        "ContextParallel",
        "ExpertParallel",
        "PrepareModuleInput",
        "PrepareModuleOutput",
        "PrepareModuleInputOutput",
        "register_style",
        "parallelize_module",
        "overlap_collectives",
        "loss_parallel",
        "vocab_parallel_cross_entropy",
    ],
    "hyper_parallel.core.tensor_parallel.loss": ["loss_parallel", "vocab_parallel_cross_entropy"],
    "hyper_parallel.debug": ["CommDebugMode"],
}


@pytest.mark.parametrize("name", hyper_parallel.__all__)
def test_name(name: str) -> None:
    assert getattr(hyper_parallel, name).__doc__
    assert name in dir(hyper_parallel)


@pytest.mark.parametrize("path", PATHS)
def test_path(path: str) -> None:
    module = importlib.import_module(path)
    for name in PATHS[path]:
        assert getattr(module, name).__doc__
        assert name in dir(module)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Colwise'"):
        _ = hyper_parallel.Colwise
