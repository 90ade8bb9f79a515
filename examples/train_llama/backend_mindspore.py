"""The part of the example that is particular to MindSpore: loading, one training step, and numpy at the border."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.experimental.optim import AdamW

from config import VOCAB_SIZE, RunConfig
from hyper_parallel import DeviceMesh, DTensor, Partial
from hyper_parallel.mindspore import value_and_grad
from model_mindspore import LlamaForCausalLM
from plan import part_of_batch, spread


class Trainer:
    """A model and its optimizer; spread over `mesh`, with the dimensions "dp" and "tp", or whole when that is None."""

    def __init__(self, run: RunConfig, weights: Path, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.model = LlamaForCausalLM(run.model)
        loaded = ms.load_checkpoint(str(weights), format="safetensors")
        ms.load_param_into_net(self.model, loaded, strict_load=True)
        if mesh is not None:
            spread(self.model, mesh)
        self.optimizer = AdamW(
            self.model.trainable_params(),
            betas=run.betas,
            eps=run.adam_eps,
            weight_decay=run.weight_decay,
        )
        self._loss_and_gradients = value_and_grad(self._loss, None, self.optimizer.parameters)
        self._latest_gradients: tuple[Tensor, ...] = ()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # ops.cross_entropy says the same, seven times slower on CPU.
        log_probabilities = ops.log_softmax(self.model(inputs).reshape(-1, VOCAB_SIZE), -1)
        return -ops.gather_elements(log_probabilities, 1, targets.reshape(-1, 1)).mean()

    def step(self, inputs: np.ndarray, targets: np.ndarray, learning_rate: float) -> float:
        """Train on one batch, each row of processes along "dp" on its part; return the loss of the whole."""
        if self.mesh is not None:
            inputs, targets = (part_of_batch(x, self.mesh) for x in (inputs, targets))
        for group in self.optimizer.param_groups:
            ops.assign(group["lr"], Tensor(learning_rate, ms.float32))
        loss, self._latest_gradients = self._loss_and_gradients(Tensor(inputs), Tensor(targets))
        self.optimizer(self._latest_gradients)
        if self.mesh is not None:
            loss = DTensor.from_local(loss, self.mesh["dp"], [Partial("avg")]).full_tensor()
        return float(loss)

    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters and of optimizer state that this process holds."""
        optimizer = self.optimizer
        held = {"parameters": optimizer.parameters, "optimizer state": [*optimizer.exp_avg, *optimizer.exp_avg_sq]}
        return {what: sum(_local(x).nbytes for x in tensors) for what, tensors in held.items()}

    def gradients(self) -> dict[str, np.ndarray]:
        """Whole gradients of the latest step by parameter name. Every process must call it."""
        whole = {}
        for parameter, gradient in zip(self.optimizer.parameters, self._latest_gradients, strict=True):
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            whole[parameter.name] = gradient.asnumpy()
        return whole

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross entropy in nats, without training."""
        return float(self._loss(Tensor(inputs), Tensor(targets)))

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Logits (batch, length, VOCAB_SIZE), the same on every process."""
        return self.model(Tensor(inputs)).asnumpy()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
