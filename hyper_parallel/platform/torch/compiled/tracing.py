"""The switch between the two forwards of a plan: the second one runs under torch's compiler, or on a test's request."""

from __future__ import annotations

import torch

__all__ = ["is_tracing"]

is_tracing = torch.compiler.is_compiling
