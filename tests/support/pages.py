"""The Python code of the documentation, run as it stands on all ranks of the pool.

The blocks of a page run one after the other in one set of names. Fragments stand on names that a reader has to think of
(a model, a batch, a loss): `PREPARED` gives them. A comment such as ``# TypeError: part of its text`` promises an
error. `PROGRAMS` and `ELSEWHERE` list the blocks that other tests run, or compare with the source.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ELSEWHERE", "PROGRAMS", "ROOT", "blocks_of", "pages", "run_page"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: page -> the test that has its code
ELSEWHERE = {
    "CONTRIBUTING.md": "tests/unit/test_habits.py",
    "docs/platform.md": "tests/unit/test_contract.py",
    "docs/writing_a_backend.md": "tests/unit/test_numpy_backend.py",
}

#: programs on pages, by their first line -> the test that runs them
PROGRAMS = {
    "mlp_torch.py": "tests/conformance/test_readme.py",
    "mlp_mindspore.py": "tests/conformance/test_readme.py",
    "cross.py": "tests/torch/test_rules_page.py",
    "bilinear.py": "tests/torch/test_rules_page.py",
    "mlp_recorded.py": "tests/mindspore/test_records.py",
    "low_rank.py": "tests/torch/test_own_style.py",
    "gpt_model.py": "tests/torch/test_training_job.py",
    "train_gpt.py": "tests/torch/test_training_job.py",
    "train_sequence.py": "tests/torch/test_training_job.py",
    "nanogpt.py": "tests/torch/test_training_job.py",
    "finetune.py": "tests/torch/test_huggingface_trainer.py",
    "loop.py": "tests/torch/test_huggingface_trainer.py",
    "lit.py": "tests/torch/test_lightning.py",
    "fabric.py": "tests/torch/test_lightning.py",
    "fsdp2.py": "tests/torch/test_other_programs.py",
    "tensor_parallel.py": "tests/torch/test_other_programs.py",
    # MindSpore compiles from files only
    "trace.py": "tests/mindspore/test_jit.py",
    "bytecode.py": "tests/mindspore/test_jit.py",
}
OF_MINDSPORE = ("mindspore.md", "mindformers.md")

_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import hyper_parallel
globals().update({name: getattr(hyper_parallel, name) for name in hyper_parallel.__all__})
_made = init_device_mesh
def init_device_mesh(device_type=None, mesh_shape=None, **names):
    # Four ranks stand for however many the page has.
    shape = None if mesh_shape is None else (4,) if len(mesh_shape) == 1 else (2, 2)
    return _made("cpu", shape, **names)
torch.manual_seed(0)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))
class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
model, mesh, config = Model(), init_device_mesh(mesh_shape=(4,), mesh_dim_names=("tp",)), None
x = ids = batch = torch.randn(4, 8)
target = torch.arange(4)
"""
#: page -> code that runs before its blocks, which gives them their names
PREPARED = {
    "docs/checkpoint.md": """
mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], plan)
dataset = list(range(64))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
def train_one_step():
    pass
""",
    "docs/checkpoint_interop.md": """
from hyper_parallel.checkpoint import save_pretrained
save_pretrained(model, "weights")
""",
    "docs/concepts.md": "x = None",
    "docs/experts.md": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, 8))
    def forward(self, x, counts):
        parts = zip(x.split(counts.tolist()), self.weight)
        return torch.cat([part @ weight for part, weight in parts])
class RoutedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 6), Experts()
    def forward(self, x):
        score, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        y = self.experts(x[order], torch.bincount(expert, minlength=6))
        return x + y[order.argsort()] * score[:, None]
class RoutedModel(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(2))
model = RoutedModel()
""",
    "docs/faults.md": """
mesh = init_device_mesh()
def step(batch):
    return DTensor.from_local(model(batch).sum(), mesh, [Partial()])
""",
    "docs/huggingface.md": """
from transformers import LlamaConfig, LlamaForCausalLM
from hyper_parallel.integrations.huggingface import parallelize_model
def fresh():
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                        num_attention_heads=4))
model, ids = fresh(), torch.arange(16).reshape(2, 8)
""",
    "docs/long_sequences.md": """
mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
x, labels = torch.randn(4, 8, 8), torch.zeros(4, 8, dtype=torch.long)
ids = torch.arange(8).reshape(1, 8)
class Attention(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)
class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList([Attending()])
    def forward(self, x, positions=None):
        x = x if positions is None else self.tokens(x) + positions[..., None]
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return self.head(self.layers[0].attention(q).transpose(1, 2).flatten(2))
model = Model()
cos, sin = torch.ones(8, 2), torch.ones(8, 2)
def criterion(y, labels):
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())
""",
    "docs/tutorials/long_sequences.md": f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "train_llama")!r})
""",
    "docs/other_programs.md": """
from types import SimpleNamespace
from tests.torch.test_other_programs import GptFast, NanoGpt
config = SimpleNamespace(n_embd=16, n_head=4)
model = NanoGpt(config)
""",
    "docs/performance.md": """
parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(x).square().mean()
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x).square().mean()
""",
    "docs/replicate.md": """
def loss_of(y):
    return y.square().mean()
batches = [x, x]
""",
    "docs/rules.md": "def rule(name):\n    return lambda function: function",
    "docs/styles.md": "from transformers.pytorch_utils import Conv1D",
    "docs/torch_interop.md": """
torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
x = distribute_tensor(x, mesh, [Shard(0)])
""",
    "docs/torchtitan.md": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        return self.wo(self.wq(x) + self.wk(x) * self.wv(x))
class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(8), nn.LayerNorm(8)
    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))
block = Block()
""",
    "docs/training.md": """
import torch.distributed as dist
device_type = "cpu"
mesh = init_device_mesh(mesh_shape=(4,), mesh_dim_names=("tp",))
class WithLoss(Model):
    def forward(self, ids, targets):
        return F.cross_entropy(super().forward(ids), targets)
model = WithLoss()
batches = [[(x, target), (x, target)], [(x, target)]]
""",
}
#: page -> block -> code that runs before this one
BETWEEN = {
    "docs/experts.md": {
        1: "model(x).sum().backward()\nmodel = RoutedModel()",
        2: """
model(x).sum().backward()
model, plan = RoutedModel(), {"layers.*.router": SequenceParallel(sequence_dim=0, use_local_output=True)}
""",
        3: """
model(x).sum().backward()
from hyper_parallel import balance_loss, tokens_per_expert
from hyper_parallel.debug import ExpertCounts
router, tokens, loss, bias, dp = nn.Linear(8, 6), x, 0, torch.zeros(6), mesh["dp"]
""",
        4: "model(x).sum().backward()",
        5: """
from torch.func import functional_call
model = RoutedModel()
for layer in model.layers:
    layer.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6))
""",
        6: 'model, mesh = RoutedModel(), init_device_mesh(mesh_shape=(2, 4), mesh_dim_names=("rest", "ep"))',
    },
    "docs/huggingface.md": {
        1: "model = fresh()",
        2: "model, ids = fresh(), ids % 32",
        3: """
from transformers import MixtralConfig, MixtralForCausalLM
model = MixtralForCausalLM(MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=4, num_key_value_heads=2, num_local_experts=4))
""",
        4: """
from tests.torch.huggingface_adapters import adapted
model = fresh()
mesh = init_device_mesh(mesh_shape=(4,))
def LoraConfig(target_modules):
    return target_modules
get_peft_model = adapted  # peft need not be installed
""",
        5: "model, ids = fresh(), ids % 32",
    },
    "docs/loss.md": {
        1: """
local_logits, mesh = model(ids).to_local().detach().requires_grad_(), {"tp": mesh}
_whole = vocab_parallel_cross_entropy
def vocab_parallel_cross_entropy(*given, vocab_size, **more):
    return _whole(*given, vocab_size=11, **more)
"""
    },
    "docs/other_programs.md": {
        1: "model = GptFast(SimpleNamespace(dim=16, n_head=4, n_local_heads=4, head_dim=4))",
    },
    "docs/performance.md": {1: "model_, model = model, Loss()", 2: "model = model_"},
    "docs/torch_interop.md": {2: "model = Model()"},
    "docs/training.md": {
        1: "seed = 0",
        2: """
mesh, model = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp")), Model()
model(x).sum().backward()
""",
    },
}


def pages(*, mindspore: bool = False) -> list[str]:
    """Pages with Python code that runs here: those of MindSpore, or all others."""
    found = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md")))]
    run_here = [page for page in found if page not in ELSEWHERE and blocks_of(page)]
    return [page for page in run_here if page.endswith(OF_MINDSPORE) == mindspore]


def blocks_of(page: str) -> list[str]:
    """The page's blocks of Python, without programs that another test runs."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if not any(block.startswith(f"# {name}\n") for name in PROGRAMS)]


def run_page(page: str, folder: str) -> int:
    """Run its blocks in a folder that all ranks share; returns how many there were."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = blocks_of(page)
    with _working_in(folder):
        if not page.endswith(OF_MINDSPORE):
            exec(_MODEL + PREPARED.get(page, ""), names)
        for i, block in enumerate(blocks):
            exec(BETWEEN.get(page, {}).get(i, ""), names)
            promised = re.search(r"^# (\w+Error): (.+)$", block, re.MULTILINE)
            with _raised(*promised.groups()) if promised else contextlib.nullcontext():
                exec(compile(block, f"{page}, block {i + 1}", "exec"), names)
    return len(blocks)


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _raised(kind: str, text: str) -> Iterator[None]:
    """Check the error that a comment in a block promises."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != kind or text not in str(error):
            raise
    else:
        raise AssertionError(f"no {kind} was raised: {text}")
