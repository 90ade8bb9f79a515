"""Training as users of Trainer, TRL and accelerate write it, in one process or over a mesh, and its results.

The global batch is the same for every mesh, so that losses, norms and weights are those of one process.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, fully_shard, init_device_mesh
from hyper_parallel.integrations.huggingface import (
    parallelize_accelerator,
    parallelize_model,
    parallelize_trainer,
)

__all__ = [
    "Job",
    "accelerated",
    "draw_alike",
    "generate_different_lengths",
    "generated",
    "in_one_process",
    "llama",
    "over_a_mesh",
    "refuse",
    "refuse_on_ranks",
    "supervised",
    "trained",
]

#: Samples of a step, in two micro batches.
BATCH, MICRO_BATCHES = 8, 2
SAMPLES, LENGTH, WORDS = 40, 12, 96


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        folder: for its checkpoints.
        shape, names: of its mesh; an empty shape is one process without a mesh.
        options: keywords of `parallelize_trainer` and `parallelize_accelerator`.
        arguments: further ones of the Trainer.
        resume: a checkpoint to go on with.
        by_hand: whether the program divides the model itself.
        adapters: whether LoRA adapters of peft are trained.
        sizes: where the mesh is an ``accelerate.ParallelismConfig``: ``"given"`` to the function, or ``"own"`` for the
            accelerator's.
    """

    folder: str
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ("dp", "tp")
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    by_hand: bool = False
    adapters: bool = False
    sizes: str = ""

    def mesh(self) -> Any:
        """The mesh, or the sizes of a mesh."""
        if self.sizes:
            from accelerate import ParallelismConfig

            return ParallelismConfig(**dict(zip((f"{name}_size" for name in self.names), self.shape, strict=True)))
        return init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)

    @property
    def batches(self) -> int:
        """How many ranks have batches of their own."""
        sizes = dict(zip(self.names, self.shape, strict=False))
        return int(np.prod([size for name, size in sizes.items() if name != "tp"] or [1]))


@contextmanager
def fresh(ranks: bool) -> Iterator[None]:
    """Forget what accelerate knows of an earlier job in this process. Without ``ranks`` the process is alone."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()

    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    hidden = {} if ranks else {name: os.environ.pop(name) for name in launched if name in os.environ}
    reset()
    try:
        yield
    finally:
        reset()
        os.environ.update(hidden)


def llama() -> Any:
    """A small Llama in double precision, the same in each process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    special = {"pad_token_id": 90, "bos_token_id": 91, "eos_token_id": 92}
    return LlamaForCausalLM(LlamaConfig(**sizes, **special, num_attention_heads=4, num_key_value_heads=2)).double()


class Samples(Dataset):
    """Sequences, of which some begin with ignored labels, up to ``ignored`` of them."""

    def __init__(self, count: int, ignored: int = 4) -> None:
        self._ignored = ignored
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(WORDS, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = self._ids[i].clone()
        labels = ids.clone()
        labels[: i % (self._ignored + 1)] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


class Stream(IterableDataset):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (Samples(SAMPLES)[i] for i in range(SAMPLES))


def arguments_of(job: Job) -> dict[str, Any]:
    """The arguments of a Trainer."""
    return {
        "per_device_train_batch_size": BATCH // MICRO_BATCHES // job.batches,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "per_device_eval_batch_size": 2,  # of 7 samples, so that a rank's last batch is filled up
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **job.arguments,
    }


def log_of() -> Any:
    """A callback with the numbers that a Trainer logs."""
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        """Keeps the numbers of each step that any machine gives."""

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            kept = {key: value for key, value in logs.items() if not key.endswith(("_time", "runtime", "_second"))}
            self.rows.append({"step": state.global_step, **kept})

    return Log()


def metrics(predicted: Any) -> dict[str, float]:
    """Share of right words, and the number of samples, each of which counts once."""
    words, labels = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    known = labels != -100
    return {"accuracy": float((words == labels)[known].mean()), "count": len(words)}


def divide(trainer: Any, job: Job) -> None:
    """Divide a Trainer's model over the mesh of the job, or do nothing for one process."""
    if not job.shape:
        return
    mesh = job.mesh()
    if job.by_hand:
        parallelize_model(trainer.model, mesh["tp"])
        fully_shard(trainer.model, mesh=mesh["dp"])
    assert parallelize_trainer(trainer, mesh, **job.options) is trainer
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    # Workers draw random numbers for the samples of a batch.
    begin = trainer.get_train_dataloader().worker_init_fn
    assert begin is None or begin.keywords["rank"] == trainer.accelerator.process_index


def ended(trainer: Any, job: Job, log: Any) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Train, save; give the log and the saved weights."""
    from safetensors.numpy import load_file

    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=job.resume)
    final = Path(job.folder) / "final"
    trainer.save_model(str(final))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    name = "adapter_model.safetensors" if job.adapters else "model.safetensors"
    return [{"step": 0, "before": before["eval_loss"]}, *log.rows], load_file(final / name)


def trained(job: Job) -> Any:
    """Train by `transformers.Trainer`; returns its log and the weights that it saved."""
    from transformers import Trainer, TrainingArguments

    log = log_of()
    trainer = Trainer(
        model=llama(),
        args=TrainingArguments(job.folder, **arguments_of(job)),
        train_dataset=Stream() if job.arguments.get("max_steps") == 3 else Samples(SAMPLES),
        eval_dataset=Samples(7),
        compute_metrics=metrics,
        callbacks=[log],
    )
    divide(trainer, job)
    return ended(trainer, job, log)


def supervised(job: Job) -> Any:
    """Train by TRL's ``SFTTrainer``; returns as `trained` does."""
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = [f"w{i}" for i in range(90)]
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    places = {word: i for i, word in enumerate([*words, *special.values()])}
    inner = Tokenizer(models.WordLevel(places, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.randrange(3, 14))) for _ in range(SAMPLES)]
    data, log = Table.from_list([{"text": text} for text in texts]), log_of()
    adapters: dict[str, Any] = {}
    if job.adapters:
        from peft import LoraConfig

        names = ["q_proj", "o_proj", "up_proj", "down_proj"]
        adapters["peft_config"] = LoraConfig(r=4, target_modules=names, init_lora_weights="gaussian")
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(job.folder, max_length=16, bf16=False, gradient_checkpointing=True, **arguments_of(job)),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=inner, **special),
        callbacks=[log],
        **adapters,
    )
    divide(trainer, job)
    return ended(trainer, job, log)


def generated(job: Job) -> Any:
    """Train a T5 by ``Seq2SeqTrainer``; returns losses and the words that it generates for seven samples.

    T5 takes keywords of a loss and leaves them. So the Trainer would multiply its mean by the number of processes. No
    label is ignored, since T5 takes the mean over a rank's tokens.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).double()
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            job.folder,
            predict_with_generate=True,
            generation_max_length=6,
            generation_num_beams=2,
            average_tokens_across_devices=False,
            **arguments_of(job),
        ),
        train_dataset=Samples(SAMPLES, ignored=0),
        eval_dataset=Samples(7),
    )
    divide(trainer, job)
    trainer.train()
    rows = [
        row[name] for row in trainer.state.log_history for name in ("loss", "grad_norm", "eval_loss") if name in row
    ]
    return rows, trainer.predict(Samples(7)).predictions


def accelerated(job: Job) -> Any:
    """Train in a loop of one's own with accelerate; returns a row for each micro batch, and the weights."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from safetensors.numpy import load_file

    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, dataloader_config=order)
    if job.sizes == "own":  # accelerate itself takes the sizes where ranks have GPUs
        accelerator.state.parallelism_config = job.mesh()
        assert parallelize_accelerator(accelerator, **job.options) is accelerator
        assert accelerator.parallelism_config is None
    elif job.shape:
        assert parallelize_accelerator(accelerator, job.mesh(), **job.options) is accelerator
    model, data = llama(), [sample["input_ids"] for sample in (Samples(SAMPLES)[i] for i in range(SAMPLES))]
    size = BATCH // MICRO_BATCHES // job.batches
    loader = DataLoader(data, batch_size=size, shuffle=True)
    held = DataLoader(data[:7], batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10 * job.batches)
    model, optimizer, loader, held, scheduler = accelerator.prepare(model, optimizer, loader, held, scheduler)
    rows: list[Any] = []
    for epoch in range(2):
        if job.resume is not None and epoch == 0:
            accelerator.load_state(job.resume)
            loader.set_epoch(1)
            continue
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) if accelerator.sync_gradients else 0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean().item()
            both = accelerator.reduce({"loss": loss.detach()}, "mean")["loss"].item()
            assert abs(both - mean) < 1e-12
            rows.append([mean, norm, optimizer.param_groups[0]["lr"]])
        model.eval()
        right, texts = [], []
        with torch.no_grad():
            for ids in held:
                words = accelerator.gather_for_metrics((model(input_ids=ids).logits.argmax(-1), ids))
                right.append((words[0] == words[1]).sum(1))
                texts += accelerator.gather_for_metrics([str(each.tolist()) for each in ids])
        assert texts == [str(each.tolist()) for each in data[:7]]
        rows.append([torch.cat(right).sum().item(), sum(map(len, right))])
        model.train()
        if epoch == 0:
            accelerator.save_state(f"{job.folder}/state")
    accelerator.save_model(model, f"{job.folder}/final")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return rows, load_file(f"{job.folder}/final/model.safetensors")


def refuse(folder: str, what: str, how: dict[str, Any], kind: type, match: str) -> None:
    """Check that a wrong use is refused, and that nothing has been changed."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from transformers import Trainer, TrainingArguments

    with fresh(False):
        mesh = init_device_mesh("cpu", how.get("shape", (1, 1)), mesh_dim_names=how.get("names", ("dp", "tp")))
        if what == "trainer":
            call: Any = parallelize_trainer
            arguments = {"use_cpu": True, "report_to": [], **how.get("arguments", {})}
            given: Any = Trainer(model=llama(), args=TrainingArguments(folder, **arguments))
        else:
            call = parallelize_accelerator
            given = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches="dispatch" in how))
        kinds, patch = type(given), pytest.MonkeyPatch()
        if "twice" in how:
            call(given, mesh)
            kinds = type(given)
        if "after" in how:
            given.prepare(llama())
        with patch.context() as patches:
            if "without" in how:
                owner = next(base for base in kinds.__mro__ if how["without"] in base.__dict__)
                patches.delattr(owner, how["without"])
            if "kind" in how:
                patches.setattr(kinds, "distributed_type", how["kind"])
            if "config" in how:
                patches.setattr(kinds, "parallelism_config", SimpleNamespace(total_size=2))
            if "sizes" in how:
                from accelerate import ParallelismConfig

                mesh = ParallelismConfig(**how["sizes"])
            with pytest.raises(kind, match=match):
                way = {"data_parallel": how.get("data_parallel", "fully_shard"), "plan": how.get("plan")}
                call(how.get("object", given), mesh, **way)
        assert type(given) is kinds
        if what == "trainer" and "twice" not in how:
            assert type(given.accelerator) is Accelerator


def refuse_on_ranks() -> None:
    """Check refusals that need ranks: a mesh of some, a model without a plan, inputs that ranks would divide."""
    from accelerate import Accelerator

    with fresh(True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match=r"needs a mesh of all ranks: .* has 2 of 4"):
            parallelize_accelerator(Accelerator(cpu=True), mesh["tp"])
        accelerator = parallelize_accelerator(Accelerator(cpu=True), mesh)
        with pytest.raises(ValueError, match="has no plan for Linear"):
            accelerator.prepare(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match="split_between_processes gives each rank different inputs"):
            accelerator.split_between_processes([1, 2])
    with fresh(True):
        alone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        accelerator = parallelize_accelerator(Accelerator(cpu=True), alone)
        with accelerator.split_between_processes([0, 1, 2, 3]) as mine:
            assert mine == [alone.get_rank()]
    with fresh(True):
        layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        accelerator = parallelize_accelerator(Accelerator(cpu=True), mesh, plan=layers, units=["Linear"])
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).double()
        single, x = copy.deepcopy(model), torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
        model = accelerator.prepare(model)
        assert torch.allclose(model(x), single(x))


def draw_alike(folder: str) -> None:
    """Check that ranks that share a model draw the same numbers after a resume, though they saved other states."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    with fresh(True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        accelerator = parallelize_accelerator(Accelerator(cpu=True), mesh)
        arguments = {name: value for name, value in arguments_of(Job(folder)).items() if "eval" not in name}
        trainer = Trainer(model=llama(), args=TrainingArguments(folder, **arguments))
        parallelize_trainer(trainer, mesh)
        for save, load in (
            (accelerator.save_state, accelerator.load_state),
            (trainer._save_rng_state, trainer._load_rng_state),
        ):
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(mesh.get_rank())
            save(folder)
            torch.distributed.barrier()
            load(folder)
            numbers: list[Any] = [None] * 4
            torch.distributed.all_gather_object(numbers, drawn())
            assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def generate_different_lengths() -> None:
    """Check the words of ranks with prompts of their own, of which some end earlier."""
    from accelerate import Accelerator

    with fresh(True):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        accelerator = parallelize_accelerator(Accelerator(cpu=True), mesh)
        model, options = llama(), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        prompts = [Samples(4)[i]["input_ids"][None, :4] for i in range(4)]
        words = [model.generate(prompt, **options, eos_token_id=-1)[0, 4:].tolist() for prompt in prompts]
        end = next(word for word in words[0][:2] if word not in words[1])
        wanted = model.generate(prompts[mesh.get_rank()], **options, eos_token_id=end)
        divided = accelerator.prepare(model)
        assert torch.equal(divided.generate(prompts[mesh.get_rank()], **options, eos_token_id=end), wanted)


def in_one_process(way: str, job: Job) -> Any:
    """The results of a job without a mesh."""
    with fresh(False):
        return globals()[way](job)


def over_a_mesh(way: str, job: Job) -> Any:
    """The results of a job on the ranks of the test pool."""
    with fresh(True):
        return globals()[way](job)
