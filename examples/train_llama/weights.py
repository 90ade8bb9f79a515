"""Initial weights, drawn by numpy so that every framework starts from the same numbers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from config import LlamaConfig


def initial_weights(config: LlamaConfig, seed: int) -> dict[str, np.ndarray]:
    """Llama's usual initialisation: normals scaled by fan-in, smaller for layers that feed the residual."""
    generator = np.random.Generator(np.random.Philox(seed))
    weights = {}
    for name, shape in config.parameter_shapes().items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        scale = 0.5 if name == "model.embed_tokens.weight" else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            scale /= (2 * config.num_hidden_layers) ** 0.5
        weights[name] = (scale * generator.standard_normal(shape)).astype(np.float32)
    return weights


def write_initial_weights(folder: Path, config: LlamaConfig, seed: int) -> Path:
    """Write the initial weights as safetensors, unless that file is there already; return its path.

    The name is a digest of the content and the file appears atomically. So any number of processes may call this at the
    same time.
    """
    content = save(initial_weights(config, seed))
    path = folder / f"initial-{hashlib.sha256(content).hexdigest()[:12]}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)
    return path
