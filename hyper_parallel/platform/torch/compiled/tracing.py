"""Whether the second forward of a plan runs: under torch's compiler, or because a test asks for it."""

from __future__ import annotations

import torch

__all__ = ["is_tracing"]

is_tracing = torch.compiler.is_compiling
