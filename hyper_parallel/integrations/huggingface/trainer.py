"""`parallelize_trainer`: tensor and data parallelism for the Trainer of Hugging Face transformers, and its
subclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel import checkpoint
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.integrations.huggingface.accelerator import attach, check_accelerator, mesh_for
from hyper_parallel.integrations.huggingface.division import Division
from hyper_parallel.integrations.huggingface.given_objects import check_known, give_methods
from hyper_parallel.integrations.huggingface.saving import full_state_dict, load_pretrained
from hyper_parallel.integrations.torch.state_dict_values import StateDictOptions
from hyper_parallel.integrations.torch.state_dicts import set_optimizer_state_dict

__all__ = ["by_names", "load_weights", "parallelize_trainer"]

#: Release that this module was written for.
_KNOWN = "5.24"
#: Attributes of a Trainer that this module replaces or uses.
_NEEDED = (
    *("get_total_train_batch_size", "_save", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
    *("_load_from_checkpoint", "_load_rng_state", "_load_best_model", "evaluation_loop", "prediction_step"),
    *("accelerator", "model", "args"),
)
#: The folder of an optimizer's shards in a checkpoint, and the files of a Trainer without parallelism.
_FOLDER, _WHOLE, _SCHEDULER = "optimizer", "optimizer.pt", "scheduler.pt"
_ADAPTERS = "adapter_model.safetensors"


def parallelize_trainer(
    trainer: Any,
    mesh: DeviceMesh | Any = None,
    *,
    plan: Mapping[str, Any] | None = None,
    data_parallel: str = "fully_shard",
    units: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Divide the model of a ``transformers.Trainer`` over a mesh, in place. The rest of the job does not change.

    Ranks that share a model get the same batches, and count once in losses, metrics and numbers of tokens. A saved
    model has full weights, in files that ``from_pretrained`` reads. A checkpoint has the optimizer's shards, and can be
    resumed on any mesh. Subclasses such as ``SFTTrainer`` of TRL work too.

    Args:
        trainer: a ``transformers.Trainer`` that has not trained.
        mesh: mesh of all ranks, with names. The dimension ``"tp"`` is for tensor parallelism, all others are for data
            parallelism. Of two others `fully_shard` replicates over the first, and shards over the second. An
            ``accelerate.ParallelismConfig`` gives a mesh of its sizes. None is the ``parallelism_config`` of the
            Trainer's arguments, if they have one, or the mesh entered with ``with mesh:``.
        plan: as for `parallelize_model`.
        data_parallel: ``"fully_shard"``, or ``"replicate"`` for unsharded parameters on each rank.
        units: names of the module classes that become units of `fully_shard`. None uses the layers that the model names
            in ``_no_split_modules``.
        options: further keywords of `parallelize_model`, such as ``gather_heads``.

    Returns:
        ``trainer``. Its model is divided now, unless it had distributed parameters before.

    Raises:
        TypeError: for another object. ValueError: for a Trainer that divides models in another way (``fsdp``,
            ``deepspeed``), for both a ``parallelism_config`` and a mesh, for arguments that read batches in another
            way, for a mesh that does not fit, and all that `parallelize_model` refuses. Trainer and accelerator are
            unchanged then.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import parallelize_trainer
        >>> trainer = Trainer(model=model, args=args, train_dataset=data)  # doctest: +SKIP
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> parallelize_trainer(trainer, mesh).train()  # doctest: +SKIP
    """
    _check(trainer)
    mesh = mesh_for(trainer.accelerator, mesh, "parallelize_trainer")
    division = Division(mesh, plan, data_parallel, units, options, "parallelize_trainer")
    division.apply(trainer.model)  # which may refuse the plan: Trainer and accelerator are unchanged then
    attach(trainer.accelerator, division)
    trainer.args.parallelism_config = None
    give_methods(trainer, _Divided)
    trainer._division = division
    return trainer


def _check(trainer: Any) -> None:
    if isinstance(trainer, _Divided):
        raise ValueError("parallelize_trainer: this Trainer has a mesh already")
    check_known(trainer, _NEEDED, "parallelize_trainer", "a transformers.Trainer", _KNOWN)
    if getattr(trainer.args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives each rank different samples, but ranks with shards of "
            "one model need the same samples: choose 'random', 'sequential' or 'group_by_length'"
        )
    check_accelerator(trainer.accelerator)


#: Stands in for ``transformers.Trainer``, which is not imported here.
_Base: Any = object


class _Divided(_Base):
    """Methods of a Trainer whose ranks share a model, placed before ``transformers.Trainer`` in the class's bases."""

    _division: Division

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        """Return the number of samples of a step. Ranks that share a model count once."""
        return self._train_batch_size * args.gradient_accumulation_steps * self._division.count

    def floating_point_ops(self: Any, inputs: Any) -> float:
        """Return the number of operations that this rank computes for a batch. Ranks that share a model divide the
        operations."""
        operations: float = super().floating_point_ops(inputs)
        return operations if self._division.tensor is None else operations / self._division.tensor.size()

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate each sample once.

        The last batches are padded with samples of earlier batches, which ``Seq2SeqTrainer`` would count twice.
        """
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch with the mean over the tokens of this batch, as one process does.

        In training the mean is over the tokens of all batches. Samples that fill up the last batch are left out.
        """
        from accelerate.utils import recursively_apply

        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        size, own = self._samples_of(inputs)
        try:
            if own == size:
                return super().prediction_step(model, inputs, *args, **kwargs)
            inputs = recursively_apply(lambda x: x[:own], inputs)
            loss, *outputs = super().prediction_step(model, inputs, *args, **kwargs)
            # All ranks gather equal shapes. The rows that are added here are dropped after that.
            return loss, *recursively_apply(lambda x: _with_rows(x, own, size), outputs)
        finally:
            self.args.average_tokens_across_devices = averages

    def _samples_of(self: Any, inputs: Any) -> tuple[int, int]:
        """Return the number of samples of this rank's batch, and how many of them do not fill it up.

        The numbers are equal where one is unknown: without a row for each sample in every tensor.
        """
        from accelerate.utils import recursively_apply

        state = self.accelerator.gradient_state
        sizes: set[int] = set()
        recursively_apply(lambda x: sizes.add(len(x) if x.ndim else 0), inputs)
        size = max(sizes, default=0)
        total = getattr(state.active_dataloader, "total_batch_size", None)
        known = sizes == {size} and total == size * self._division.count
        if not known or not state.end_of_dataloader or state.remainder <= 0:
            return size, size
        own = min(max(state.remainder - self._division.index * size, 0), size)
        return size, own or size  # nothing of a batch without samples of its own counts

    # ---------------------------------------------------------------------- saving
    def _save(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        """Gather the weights on all ranks. The first rank writes them."""
        super()._save(output_dir, full_state_dict(self.model) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """Save the optimizer's shards of each rank, and the scheduler in the Trainer's format."""
        checkpoint.save({"optimizer": _native(self.optimizer)}, Path(output_dir) / _FOLDER, overwrite=True)
        optimizer, self.optimizer = self.optimizer, _Nothing()
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer
        if self.args.should_save:
            (Path(output_dir) / _WHOLE).unlink(missing_ok=True)

    # ---------------------------------------------------------------------- loading
    def _load_optimizer_and_scheduler(self: Any, checkpoint_folder: str | None) -> None:
        """Load the optimizer, even from a Trainer without parallelism, and the scheduler."""
        if checkpoint_folder is None:
            return
        from accelerate.utils.other import load  # executes no code from files

        folder = Path(checkpoint_folder)
        if (folder / _FOLDER).is_dir():
            checkpoint.load({"optimizer": _native(self.optimizer)}, folder / _FOLDER)
        elif (folder / _WHOLE).is_file():
            state = by_names(load(folder / _WHOLE, map_location="cpu"), self.model, _native(self.optimizer))
            set_optimizer_state_dict(
                self.model, _native(self.optimizer), state, options=StateDictOptions(full_state_dict=True)
            )
        if (folder / _SCHEDULER).is_file():
            self.lr_scheduler.load_state_dict(load(folder / _SCHEDULER))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        """Load the generators' states. Ranks that share a model draw the same numbers, on any mesh."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._division.share_random_states()

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load full weights. Each rank reads its shard."""
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self: Any) -> None:
        """Load the weights of the best checkpoint. Each rank reads its shard."""
        load_weights(self.model, Path(self.state.best_model_checkpoint))


class _Nothing:
    """Placeholder for an optimizer that is saved separately."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def _with_rows(x: Any, own: int, size: int) -> Any:
    """Return an output of ``own`` samples, repeated up to the rows of ``size`` samples."""
    if not x.ndim or len(x) % own:
        return x
    return x.repeat(-(-size // own), *(1 for _ in x.shape[1:]))[: len(x) // own * size]


def _native(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights, or the adapters, in a folder of a Trainer. Each rank reads its shard.

    Raises:
        ValueError: for an adapter that the model lacks. ValueError, CheckpointError: as `load_pretrained` raises.
    """
    adapters = folder / _ADAPTERS
    if not adapters.is_file():
        load_pretrained(model, folder)
        return
    # Names in files lack the name of the adapter, and of the holder of a module that is trained in full.
    names = {
        name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".").removesuffix(f".{adapter}"): name
        for name in model.state_dict()
        for adapter in model.active_adapters
    }

    def name_of(saved: str) -> str:
        if saved not in names:
            raise ValueError(f"{adapters} has {saved!r}, which matches no adapter of the model")
        return names[saved]

    load_pretrained(model, adapters, rename=name_of, strict=False)


def by_names(saved: Mapping[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state dict with names of parameters in place of their numbers.

    Raises:
        ValueError: for the state of another number of parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(order) != len(numbers):
        raise ValueError(
            f"the saved optimizer has {len(numbers)} parameters, but the present optimizer has {len(order)}"
        )
    named = dict(zip(numbers, order, strict=True))
    return {
        "state": {named[number]: state for number, state in saved["state"].items()},
        "param_groups": [{**group, "params": [named[n] for n in group["params"]]} for group in saved["param_groups"]],
    }
