"""Checkpoints: saved once, loaded anywhere, on any mesh, with any placements, on any framework.

A checkpoint is a directory with files of tensors in the format of safetensors and an index in JSON. The index says
where each rectangle of each tensor is stored. Mesh, placements, framework and number of ranks mean nothing for loading.
"""

from hyper_parallel.checkpoint.directories import latest
from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.loading import load
from hyper_parallel.checkpoint.pretrained import load_pretrained, save_pretrained
from hyper_parallel.checkpoint.random_state import RandomState
from hyper_parallel.checkpoint.sampler import StatefulDistributedSampler
from hyper_parallel.checkpoint.saving import AsyncSave, async_save, save

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "RandomState",
    "StatefulDistributedSampler",
    "async_save",
    "latest",
    "load",
    "load_pretrained",
    "save",
    "save_pretrained",
]
