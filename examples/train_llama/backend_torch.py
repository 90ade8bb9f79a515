"""What is particular to PyTorch: loading, one training step, and numpy at the border."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from config import RunConfig
from hyper_parallel import DeviceMesh, DTensor, get_platform, parallelize_module
from model_torch import LlamaForCausalLM
from plan import tensor_parallel_plan


class Trainer:
    """A model and its optimizer; sharded over `mesh`, or whole when that is None."""

    def __init__(self, run: RunConfig, weights: Path, mesh: DeviceMesh | None = None) -> None:
        self.device_type = get_platform().device_type
        self.model = LlamaForCausalLM(run.model)
        self.model.load_state_dict(load_file(weights))
        self.model.to(self.device_type)
        if mesh is not None:
            parallelize_module(self.model, mesh, tensor_parallel_plan())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=run.betas,
            eps=run.adam_eps,
            weight_decay=run.weight_decay,
        )

    def _loss(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        logits = self.model(self._tensor(inputs))
        return F.cross_entropy(logits.flatten(0, 1), self._tensor(targets).flatten())

    def _tensor(self, tokens: np.ndarray) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.device_type)

    def step(self, inputs: np.ndarray, targets: np.ndarray, learning_rate: float) -> float:
        """Train on one batch; return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = self._loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self) -> dict[str, np.ndarray]:
        """Whole gradients of the latest step by parameter name. Every process must call it."""
        whole = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            whole[name] = gradient.detach().cpu().numpy()
        return whole

    @torch.no_grad()
    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross entropy in nats, without training."""
        return self._loss(inputs, targets).item()

    @torch.no_grad()
    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Logits (batch, length, VOCAB_SIZE), the same on every process."""
        return self.model(self._tensor(inputs)).cpu().numpy()
