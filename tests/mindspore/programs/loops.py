"""Programs that differ in their loops: MindSpore's `Model` and its callbacks, files, loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops

from hyper_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.mindspore import value_and_grad
from tests.mindspore.nets import whole
from tests.mindspore.programs.cells import classified, mlp, mlp_plan, scored
from tests.mindspore.programs.program import Job, Program

__all__ = ["PROGRAMS"]


class Keep(ms.Callback):
    """Keeps the losses of `Model.train`."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def on_train_step_end(self, run_context: Any) -> None:
        self.job.losses.append(float(whole(run_context.original_args().net_outputs)))


class Doubling(ms.Callback):
    """Doubles the learning rate after the second step."""

    def on_train_step_end(self, run_context: Any) -> None:
        given = run_context.original_args()
        if given.cur_step_num == 2:
            ops.assign(given.optimizer.learning_rate, Tensor(0.2, ms.float32))


def data_of(job: Job) -> Any:
    batches = [tuple(x.asnumpy() for x in batch) for batch in job.batches]
    return ds.GeneratorDataset(batches, ["data", "label"], shuffle=False, python_multiprocessing=False)


def by_model(*callbacks: Callable[[], Any]) -> Callable[[Job], None]:
    def train(job: Job) -> None:
        model = ms.Model(job.net, optimizer=nn.Momentum(job.parameters, Tensor(0.1, ms.float32), 0.9))
        made = [callback() for callback in callbacks]
        model.train(1, data_of(job), callbacks=[Keep(job), *made], dataset_sink_mode=False)

    return train


def with_files(job: Job) -> None:
    """`ModelCheckpoint` saves every second step; the last file is loaded, and trained on."""
    with TemporaryDirectory() as folder:
        saving = ms.ModelCheckpoint("job", folder, ms.CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=5))
        by_model(lambda: saving)(job)
        files = sorted(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        assert ms.load_param_into_net(job.net, ms.load_checkpoint(str(files[0])))[0] == []
    optimizer = nn.SGD(job.parameters, 0.1)
    optimizer(job.differentiate(job.batches[0]))


def one_step_cell(job: Job) -> None:
    step = nn.TrainOneStepCell(job.net, nn.Adam(job.parameters, 0.01, eps=1e-3)).set_train()
    for batch in job.batches:
        job.losses.append(float(whole(step(*batch))))


def evaluated(job: Job) -> None:
    """Evaluation between the steps, in evaluation mode."""
    optimizer = nn.SGD(job.parameters, 0.1)
    for batch in job.batches:
        optimizer(job.differentiate(batch))
        job.net.set_train(False)
        job.losses.append(float(whole(job.net(*batch))))
        job.net.set_train(True)


def saved_and_loaded(job: Job) -> None:
    """Network and optimizer are loaded after three steps, in their state after two."""
    make = lambda: nn.Adam(job.parameters, 0.01, eps=1e-3)  # noqa: E731
    optimizer = make()
    with TemporaryDirectory() as folder:
        for step, batch in enumerate(job.batches):
            optimizer(job.differentiate(batch))
            if step == 1:
                ms.save_checkpoint(job.net, f"{folder}/net.ckpt")
                ms.save_checkpoint(optimizer, f"{folder}/optimizer.ckpt")
            if step == 2:
                optimizer = make()
                for cell, name in ((job.net, "net"), (optimizer, "optimizer")):
                    assert ms.load_param_into_net(cell, ms.load_checkpoint(f"{folder}/{name}.ckpt"))[0] == []


def copied(job: Job) -> None:
    """Weights of another net, by `set_data`, and back in half of each."""
    other = scored(mlp())
    rng = np.random.default_rng(9)
    for p in other.get_parameters():
        p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32) * 0.3))
    for p, q in zip(job.net.get_parameters(), other.get_parameters(), strict=True):
        p.set_data(q)
    optimizer = nn.SGD(job.parameters, 0.1)
    for batch in job.batches:
        optimizer(job.differentiate(batch))


def scaled(job: Job) -> None:
    """Loss scaling by hand; the loss of the third step is infinite."""
    optimizer, scaler = nn.SGD(job.parameters, 0.1), ms.amp.DynamicLossScaler(64.0, 2, 3)
    for step, batch in enumerate(job.batches):
        factor = float("inf") if step == 2 else 1.0
        parameters = job.parameters

        def loss(*batch: Any, factor: float = factor) -> Any:
            return scaler.scale(job.net(*batch) * factor)

        value, gradients = value_and_grad(loss, None, parameters)(*batch)
        gradients = scaler.unscale(gradients)
        finite = bool(whole(ms.amp.all_finite(gradients)))
        scaler.adjust(Tensor(finite))
        if finite:
            job.keep(value, parameters, gradients)
            optimizer(gradients)


def with_logits(job: Job) -> None:
    """The gradient function gives the logits too, of a net without its loss."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(job.parameters, 0.1)

    def forward(data: Any, label: Any) -> tuple[Any, Any]:
        logits = job.net(data)
        return loss_fn(logits, label), logits

    for batch in job.batches:
        parameters = job.parameters
        (value, logits), gradients = value_and_grad(forward, None, parameters, has_aux=True)(*batch)
        job.keep(value, parameters, gradients)
        job.losses.append(float(whole(ops.square(logits).mean())))
        optimizer(gradients)


def _with(says: str, train: Callable[[Job], None]) -> Program:
    return Program(says, lambda: scored(mlp()), classified, mlp_plan, train)


PROGRAMS: dict[str, Program] = {
    "Model.train": _with("`Model.train` with a dataset", by_model()),
    "Model.train, LossMonitor": _with("`LossMonitor` and `TimeMonitor`", by_model(ms.LossMonitor, ms.TimeMonitor)),
    "Model.train, a callback that sets": _with("a callback that sets the learning rate", by_model(Doubling)),
    "Model.train, LearningRateScheduler": _with(
        "`LearningRateScheduler`", by_model(lambda: ms.LearningRateScheduler(lambda rate, step: rate * 0.9))
    ),
    "Model.train, ModelCheckpoint": _with("files of a callback, one of which is loaded", with_files),
    "TrainOneStepCell": _with("`nn.TrainOneStepCell` with `nn.Adam`", one_step_cell),
    "evaluation in between": _with("`set_train(False)` and back", evaluated),
    "saved and loaded": _with("`save_checkpoint` and `load_param_into_net` of net and optimizer", saved_and_loaded),
    "weights of another net": _with("`set_data` of full values", copied),
    "loss scaling": _with("`DynamicLossScaler`, and a loss that is infinite", scaled),
    "logits next to the loss": Program(
        "`value_and_grad(has_aux=True)`",
        mlp,
        classified,
        lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()},
        with_logits,
    ),
}
