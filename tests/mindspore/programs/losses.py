"""Programs that differ in their losses."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import nn, ops

from tests.mindspore.programs.cells import CLASSES, classified, mlp, mlp_plan, pairs
from tests.mindspore.programs.program import SAMPLES, Program

__all__ = ["PROGRAMS"]


class Focal(nn.LossBase):
    """A loss of the program's own."""

    def construct(self, logits: Any, labels: Any) -> Any:
        scores = ops.log_softmax(logits, 1)
        kept = ops.gather_elements(scores, 1, labels.expand_dims(1)).squeeze(1)
        return self.get_loss(-ops.square(1 - ops.exp(kept)) * kept)


class OfLogarithms(nn.Cell):
    """A loss that takes logarithms of probabilities."""

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__()
        self.loss = loss

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.loss(ops.log_softmax(logits, 1), labels)


class OfProbabilities(nn.Cell):
    """A loss that takes probabilities."""

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__()
        self.loss = loss

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.loss(ops.sigmoid(logits), labels)


class Ranked(nn.Cell):
    """A loss of two parts of the scores of a sample."""

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__()
        self.loss = loss

    def construct(self, logits: Any, labels: Any) -> Any:
        parts = [logits[:, 0], logits[:, 1]]
        if isinstance(self.loss, nn.CosineEmbeddingLoss):
            parts = [logits[:, :2], logits[:, 2:]]
        return self.loss(*parts, ops.sign(labels[:, 0]))


def probabilities(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, y = pairs(rng)
    y = np.exp(y)
    return x, (y / y.sum(1, keepdims=True)).astype(np.float32)


def yes_or_no(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, y = pairs(rng)
    return x, (y > 0).astype(np.float32)


def signs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, y = pairs(rng)
    return x, np.sign(y).astype(np.float32)


def several(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, _ = classified(rng)
    return x, rng.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32)


def _of(says: str, loss: Any, batch: Any) -> Program:
    return Program(says, lambda: nn.WithLossCell(mlp(), loss()), batch, mlp_plan)


PROGRAMS: dict[str, Program] = {
    "cross entropy, smoothed": _of(
        "`nn.CrossEntropyLoss(label_smoothing=0.1)`", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), classified
    ),
    "cross entropy, weighed": _of(
        "`nn.CrossEntropyLoss(ignore_index=...)` and no class left out",
        lambda: nn.CrossEntropyLoss(ignore_index=-100),
        classified,
    ),
    "cross entropy of probabilities": _of("classes as probabilities", nn.CrossEntropyLoss, probabilities),
    "softmax cross entropy": _of(
        "`nn.SoftmaxCrossEntropyWithLogits`",
        lambda: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        classified,
    ),
    "negative log likelihood": _of("`nn.NLLLoss` of `log_softmax`", lambda: OfLogarithms(nn.NLLLoss()), classified),
    "Kullback and Leibler": _of(
        "`nn.KLDivLoss`, mean over the batch", lambda: OfLogarithms(nn.KLDivLoss("batchmean")), probabilities
    ),
    "mean squares": _of("`nn.MSELoss`", nn.MSELoss, pairs),
    "absolute differences": _of("`nn.L1Loss`", nn.L1Loss, pairs),
    "smooth absolute differences": _of("`nn.SmoothL1Loss`", lambda: nn.SmoothL1Loss(reduction="mean"), pairs),
    "Huber": _of("`nn.HuberLoss`", lambda: nn.HuberLoss(delta=0.7), pairs),
    # Gradients of `nn.BCEWithLogitsLoss` keep, on CPUs, the number of elements of the first call.
    "yes or no": _of("`nn.BCELoss` of `sigmoid`", lambda: OfProbabilities(nn.BCELoss(reduction="mean")), yes_or_no),
    "several labels": _of("`nn.MultiLabelSoftMarginLoss`", nn.MultiLabelSoftMarginLoss, several),
    "ranking": _of("`nn.MarginRankingLoss`", lambda: Ranked(nn.MarginRankingLoss(0.2)), signs),
    "cosines": _of("`nn.CosineEmbeddingLoss`", lambda: Ranked(nn.CosineEmbeddingLoss(0.1)), signs),
    "a loss of one's own": _of("a `LossBase` with `gather_elements`", Focal, classified),
}
