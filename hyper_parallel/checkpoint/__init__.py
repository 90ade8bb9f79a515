"""Checkpoints that can be loaded on any mesh, with any placements, by any framework.

A checkpoint is a directory of tensor files in the format of safetensors, with an index in JSON. The index says where
each rectangle of each tensor is stored. Loading does not depend on the mesh, placements, framework or number of ranks
of the save.
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
