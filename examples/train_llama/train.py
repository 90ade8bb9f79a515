"""Train a small Llama with tensor and data parallelism, next to the same model on one process.

    python train.py --tp 2                                            # PyTorch
    python train.py --dp 2 --tp 2                                     # each layer fully sharded over dp besides
    python train.py --dp 2 --tp 1 --experts 4                         # two experts of each layer on each process
    python train.py --dp 2 --tp 2 --experts 4                         # one, next to tensor parallelism
    HYPER_PARALLEL_PLATFORM=mindspore python train.py --dp 2 --tp 2   # MindSpore
    python train.py --until 50 --save run                             # stop there, with a checkpoint
    HYPER_PARALLEL_PLATFORM=mindspore python train.py --tp 4 --resume run    # go on with it, on MindSpore
    python train.py --until 2 --record run    # for hyper-parallel compare: what each module computes in two steps

Ends with a non-zero status when the sharded model does not train like the whole one, or does not
predict its validation text better than byte frequencies do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from config import VOCAB_SIZE, LlamaConfig, RunConfig
from data import Corpus, load_corpus, training_batch, unigram_entropy, validation_windows
from hyper_parallel import DeviceMesh, get_platform, init_device_mesh
from hyper_parallel.checkpoint import latest, load, save
from hyper_parallel.debug import record as written
from launch import launch, under_launcher
from picture import picture_of
from progress import Progress
from weights import write_initial_weights

RUNS = Path(__file__).parent / "runs"
PROMPTS = (b"import ", b"def ", b"class ", b"    return ")

EARLY_STEPS, EARLY_TOLERANCE = 10, 1e-5
LATE_STEPS, LATE_TOLERANCE = 100, 1e-3
GRADIENT_TOLERANCE = 1e-5
RECORDED_STEPS = 2

#: Losses are printed after so many steps.
SHOWN = 10


class Trainer(Protocol):
    """The methods that `backend_torch` and `backend_mindspore` both offer, with numpy at the border."""

    model: Any
    optimizer: Any

    def step(self, inputs: np.ndarray, targets: np.ndarray, learning_rate: float) -> float: ...

    def gradients(self) -> dict[str, np.ndarray]: ...

    def bytes_held(self) -> dict[str, int]: ...

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> float: ...

    def logits(self, inputs: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass
class Record:
    """The measurements of one run; written as JSON."""

    platform: str
    processes: int
    weights: str
    first_step: int = 0
    complete: bool = True
    sharded_losses: list[float] = dataclasses.field(default_factory=list)
    unsharded_losses: list[float] = dataclasses.field(default_factory=list)
    gradient_difference: float = math.nan
    tokens_per_second: float = math.nan
    validation_bits_per_byte: float = math.nan
    unigram_bits_per_byte: float = math.nan

    def loss_difference(self, steps: int) -> float:
        """Largest relative difference between sharded and unsharded losses over the first steps."""
        sharded = np.array(self.sharded_losses[:steps])
        unsharded = np.array(self.unsharded_losses[:steps])
        return float(np.max(np.abs(sharded - unsharded) / np.abs(unsharded)))

    def failures(self) -> list[str]:
        """Every promise that this run broke, as a sentence. A NaN breaks it too."""
        promises = [
            ("first-step gradients", self.gradient_difference, GRADIENT_TOLERANCE),
            (f"first {EARLY_STEPS} losses", self.loss_difference(EARLY_STEPS), EARLY_TOLERANCE),
            (f"first {LATE_STEPS} losses", self.loss_difference(LATE_STEPS), LATE_TOLERANCE),
        ]
        broken = [
            f"{what} of the sharded and the unsharded model differ by {difference:.1e}, allowed is {allowed:.0e}"
            for what, difference, allowed in promises
            if not difference <= allowed
        ]
        if self.complete and not self.validation_bits_per_byte < self.unigram_bits_per_byte:
            broken.append(
                f"validation at {self.validation_bits_per_byte:.3f} bits per byte does not beat"
                f" the byte frequencies' {self.unigram_bits_per_byte:.3f}"
            )
        return broken


def worst_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest norm(difference) / norm over all parameters."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"parameters differ: {sorted(ours.keys() ^ theirs.keys())}")
    return float(np.max([np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name]) for name in theirs]))


def norm_of(gradients: dict[str, np.ndarray]) -> float:
    """The norm of all of them."""
    return math.sqrt(sum(float(np.linalg.norm(gradient)) ** 2 for gradient in gradients.values()))


def bits_per_byte(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray, batch: int) -> float:
    """Mean cost of a target byte in bits. Every process must call it."""
    starts = range(0, len(inputs), batch)
    nats = [trainer.loss(inputs[i : i + batch], targets[i : i + batch]) for i in starts]
    return float(np.mean(nats)) / math.log(2)


def generate(trainer: Trainer, run: RunConfig, prompts: Sequence[bytes], show: bool) -> list[bytes]:
    """Continue every prompt. Every process must call it; all draw the same bytes.

    The window keeps its full length, so that it divides among the processes. The tokens after the last byte are
    padding, which causal attention never looks at.
    """
    generator = np.random.Generator(np.random.Philox(run.seed))
    texts = [bytearray(prompt) for prompt in prompts]
    window = np.zeros((len(texts), run.model.max_position_embeddings), np.int32)
    for _ in Progress(run.sample_bytes, "sample", show):
        for row, text in zip(window, texts, strict=True):
            context = text[-len(row) :]
            row[: len(context)] = context
        logits = trainer.logits(window).astype(np.float64) / run.temperature
        for scores, text in zip(logits, texts, strict=True):
            last = scores[min(len(text), len(scores)) - 1]
            probabilities = np.exp(last - last.max())
            text.append(int(generator.choice(VOCAB_SIZE, p=probabilities / probabilities.sum())))
    return [bytes(text) for text in texts]


def train(
    run: RunConfig,
    corpus: Corpus,
    sharded: Trainer,
    unsharded: Trainer | None,
    record: Record,
    until: int,
    after: Callable[[int], None] = lambda step: None,
    recorded: Path | None = None,
) -> None:
    """Train both models step by step on the same batches. After each step ``after`` is called with the number of
    completed steps. Only rank 0 has the unsharded one. The first two steps of the sharded one are written to the folder
    ``recorded``, if there is one."""
    length = run.model.max_position_embeddings
    show = unsharded is not None
    validation = validation_windows(corpus, run.validation_windows, length)
    record.unigram_bits_per_byte = unigram_entropy(validation[1])
    seconds = 0.0
    first = record.first_step
    steps = Progress(until - first, "train", show)
    writing = ExitStack()
    for done in steps:
        step = first + done
        batch = training_batch(corpus, step, run.batch_size, length, run.seed)
        learning_rate = run.learning_rate_at(step)
        start = time.perf_counter()
        if recorded is not None and done == 0:
            writing.enter_context(written(recorded, sharded.model))
        loss = sharded.step(*batch, learning_rate)
        if done + 1 == min(RECORDED_STEPS, until - first):
            writing.close()
        if done > 0:  # the first step warms up
            seconds += time.perf_counter() - start
            record.tokens_per_second = done * batch[0].size / seconds
        gradients = sharded.gradients() if done == 0 else {}
        validate = (step + 1) % run.validate_every == 0 or step + 1 == run.steps
        if validate:
            record.validation_bits_per_byte = bits_per_byte(sharded, *validation, run.validation_batch_size)
        if unsharded is None:
            after(step + 1)
            continue

        record.sharded_losses.append(loss)
        record.unsharded_losses.append(unsharded.step(*batch, learning_rate))
        line = f"step {step + 1:4d}  sharded {loss:.6f}  unsharded {record.unsharded_losses[-1]:.6f}"
        if done == 0:
            theirs = unsharded.gradients()
            record.gradient_difference = worst_difference(gradients, theirs)
            line += (
                f"\ngradients  sharded {norm_of(gradients):.6f}  unsharded {norm_of(theirs):.6f}"
                f"  largest relative difference of a parameter's {record.gradient_difference:.1e}"
            )
        if validate:
            line += (
                f"  validation {record.validation_bits_per_byte:.3f} bits per byte"
                f" (byte frequencies: {record.unigram_bits_per_byte:.3f})"
            )
        steps.note = f"{record.tokens_per_second:.0f} tokens/s"
        if done == 0 or validate or (step + 1) % SHOWN == 0 or step + 1 == until:
            steps.print(line)
        after(step + 1)


def report(record: Record, samples: Sequence[bytes], out: Path) -> bool:
    """Print samples and figures, write the record, and say whether all promises were kept."""
    for sample in samples:
        print(f"--- sample\n{sample.decode(errors='replace')}")
    print(f"---\n{picture_of(record.sharded_losses, record.unsharded_losses, record.first_step)}")
    print(
        f"---\n{record.tokens_per_second:.0f} tokens/s; relative difference of losses:"
        f" {record.loss_difference(EARLY_STEPS):.1e} over {EARLY_STEPS} steps,"
        f" {record.loss_difference(LATE_STEPS):.1e} over {LATE_STEPS};"
        f" of first-step gradients: {record.gradient_difference:.1e}"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    print(f"losses written to {out}", flush=True)
    failures = record.failures()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return not failures


def show_bytes(sharded: Trainer, unsharded: Trainer | None, mesh: DeviceMesh) -> None:
    """Print the bytes of each process. Every process must call it."""
    held = [sharded.bytes_held()]
    for mesh_dim in reversed(range(mesh.ndim)):
        if mesh.shape[mesh_dim] > 1:
            parts = mesh.platform.all_gather_object(held, mesh.platform_group(mesh_dim), mesh.shape[mesh_dim])
            held = [own for part in parts for own in part]
    if unsharded is None:
        return
    rows = [("unsharded", unsharded.bytes_held()), *((f"rank {rank}", own) for rank, own in enumerate(held))]
    for who, own in rows:
        print(f"{who:10} " + ", ".join(f"{count:,} bytes of {what}" for what, count in own.items()), flush=True)


def save_run(folder: Path, trainer: Trainer, step: int) -> None:
    """Save the sharded model as it is after ``step`` steps. Every process must call it."""
    save({"model": trainer.model, "optimizer": trainer.optimizer, "step": step}, folder / f"step-{step}", keep=2)


def resume(folder: Path, sharded: Trainer, unsharded: Trainer | None) -> int:
    """Load the newest checkpoint in a folder; returns how many steps were trained before it.

    All processes load it, each its own shards. The first process also loads it into the unsharded model, on a mesh of
    its own.
    """
    path = latest(folder)
    if path is None:
        raise SystemExit(f"there is no checkpoint in {folder}")
    state = load({"model": sharded.model, "optimizer": sharded.optimizer, "step": 0}, path)
    alone = DeviceMesh(None, [0])
    if unsharded is not None:
        load({"model": unsharded.model, "optimizer": unsharded.optimizer}, path, mesh=alone)
        print(f"resumed from {path}", flush=True)
    return int(state["step"])


def work(run: RunConfig, arguments: argparse.Namespace) -> int:
    """One rank of the run. Returns its exit status."""
    dp, tp, out = arguments.dp, arguments.tp, arguments.out
    platform = get_platform()
    platform.init_process_group()
    if platform.world_size() != dp * tp:
        raise SystemExit(f"--dp {dp} --tp {tp}, but {platform.world_size()} processes were launched")
    mesh = init_device_mesh(mesh_shape=(dp, tp), mesh_dim_names=("dp", "tp"))
    first = platform.rank() == 0
    name = f"tp{tp}" if dp == 1 else f"dp{dp}-tp{tp}"
    name += f"-experts{arguments.experts}" if arguments.experts else ""

    framework = "mindspore" if platform.name.startswith("mindspore") else "torch"
    make_trainer = importlib.import_module(f"backend_{framework}").Trainer
    weights = write_initial_weights(RUNS, run.model, run.seed)
    sharded: Trainer = make_trainer(run, weights, mesh)
    unsharded: Trainer | None = make_trainer(run, weights) if first else None
    record = Record(platform.name, dp * tp, weights.name)
    if first:
        print(f"{platform.name}: dp={dp}, tp={tp}, weights {weights.name}", flush=True)

    if arguments.resume is not None:
        record.first_step = resume(arguments.resume, sharded, unsharded)
    until = min(arguments.until or run.steps, run.steps)
    if not record.first_step < until:
        raise SystemExit(f"{record.first_step} steps are done, and the run ends after {until}")
    record.complete = until == run.steps

    def save_now(step: int) -> None:
        if arguments.save is not None and (step == until or step % arguments.save_every == 0):
            save_run(arguments.save, sharded, step)

    train(run, load_corpus(), sharded, unsharded, record, until, save_now, arguments.record)
    show_bytes(sharded, unsharded, mesh)
    samples = generate(sharded, run, PROMPTS, show=first) if record.complete else []
    kept = report(record, samples, out or RUNS / f"{platform.name}-{name}.json") if first else True
    with quiet_errors() if framework == "mindspore" else contextlib.nullcontext():
        platform.destroy_process_group()
    return 0 if kept else 1


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Drop the error stream of this process. MindSpore logs the end of its threads there, whatever GLOG_v says."""
    stream = sys.stderr.fileno()
    before, nowhere = os.dup(stream), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    try:
        yield
    finally:
        os.dup2(before, stream)


def main() -> int:
    """Launch the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description="Train a small Llama with tensor and data parallelism.")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel processes")
    parser.add_argument("--dp", type=int, default=1, help="data parallel rows of them")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, spread over all processes")
    parser.add_argument("--steps", type=int, default=RunConfig.steps, help="of the whole run")
    parser.add_argument("--until", type=int, help="stop after so many of them")
    parser.add_argument("--save", type=Path, metavar="DIR", help="leave a checkpoint there at the end")
    parser.add_argument("--save-every", type=int, default=sys.maxsize, metavar="N", help="and after every N steps")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the newest checkpoint there")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the tensors of the first two steps there")
    parser.add_argument("--out", type=Path, help="JSON file for the losses (default: in runs/)")
    arguments = parser.parse_args()
    run = RunConfig(LlamaConfig(num_local_experts=arguments.experts), steps=arguments.steps)
    if 0 < arguments.experts < run.model.num_experts_per_tok:
        parser.error(f"--experts needs {run.model.num_experts_per_tok} of them or more")
    try:
        run.model.check_divisible(arguments.tp)
        run.check_batch(arguments.dp)
    except ValueError as error:
        parser.error(str(error))
    if under_launcher():
        return work(run, arguments)
    status = launch(arguments.dp * arguments.tp)
    print("all checks passed" if status == 0 else "FAILED, see above", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
