"""The choice between a styled module's eager forward and its compiled one, which runs under torch's compiler."""

from __future__ import annotations

import torch

__all__ = ["is_tracing"]

is_tracing = torch.compiler.is_compiling
