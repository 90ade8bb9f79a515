"""The part of the example that is particular to PyTorch: loading, one training step, and numpy at the border."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from config import RunConfig
from hyper_parallel import DeviceMesh, DTensor, Partial, get_platform
from model_torch import LlamaForCausalLM
from plan import part_of_batch, spread


class Trainer:
    """A model and its optimizer; spread over `mesh`, with the dimensions "dp" and "tp", or whole when that is None."""

    def __init__(self, run: RunConfig, weights: Path, mesh: DeviceMesh | None = None) -> None:
        self.device_type = get_platform().device_type
        self.mesh = mesh
        self.model = LlamaForCausalLM(run.model)
        self.model.load_state_dict(load_file(weights))
        self.model.to(self.device_type)
        if mesh is not None:
            spread(self.model, mesh)
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
        """Train on one batch, each row of processes along "dp" on its part; return the loss of the whole."""
        if self.mesh is not None:
            inputs, targets = (part_of_batch(x, self.mesh) for x in (inputs, targets))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = self._loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if self.mesh is not None:
            loss = DTensor.from_local(loss, self.mesh["dp"], [Partial("avg")]).full_tensor()
        return loss.item()

    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters and of optimizer state that this process holds."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        held = {"parameters": self.model.parameters(), "optimizer state": states}
        return {what: sum(_local(x).nbytes for x in tensors) for what, tensors in held.items()}

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


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
