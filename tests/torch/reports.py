"""Public reports of wrong numbers and gradients of 2024 to 2026, each with a small program of our own.

docs/wrong_gradients.md shows them, and the outcome with `torch.distributed.tensor` next to ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.torch import report_programs as programs
from tests.torch.report_tools import Tools

__all__ = ["REPORTS", "Report"]


@dataclass(frozen=True)
class Report:
    """A kind of public reports.

    Attributes:
        kind: in words.
        threads: repository and number of each report, of 2024 to 2026.
        program: see the module's docstring.
        remedy: plan or call that is right in this library; empty if the program itself is.
    """

    kind: str
    threads: str
    program: Callable[[Tools], dict[str, Any]]
    remedy: str = ""


NEMO, TITAN, MEGATRON, TORCH = "NVIDIA-NeMo/RL", "pytorch/torchtitan", "NVIDIA/Megatron-LM", "pytorch/pytorch"
HF = "huggingface/transformers"
REPORTS = [
    Report("norm in heads", f"{NEMO}#3716, {MEGATRON}#7452 (11)", programs.norm_in_heads, "`HeadNormParallel()`"),
    Report("norm over all heads", "sgl-project/sglang#20967", programs.norm_over_heads, "`output_layouts=Replicate()`"),
    Report(
        "rotary part of a latent",
        f"inclusionAI/AReno#496, {MEGATRON}#1699",
        programs.latent,
        "`NoParallel(partial_features=...)`",
    ),
    Report(
        "router whose scores multiply parts",
        f"{TITAN}#1805, #2387",
        programs.router,
        "`NoParallel(local_output_grad_placements=Partial())`",
    ),
    Report(
        "bias added on each rank", "Wenyueh/MinivLLM#80", programs.bias_on_each_rank, "a `RowwiseParallel` layer's bias"
    ),
    Report(
        "bias divided by the ranks, with its gradient",
        f"{TITAN}#4332",
        lambda t: programs.bias_on_each_rank(t, True),
        "a `RowwiseParallel` layer's bias",
    ),
    Report(
        "fused projection of a gated delta net",
        f"{MEGATRON}#1989, tenstorrent/tt-forge-models#798",
        programs.fused_projection,
        "`packed=3`",
    ),
    Report(
        "loss over a rank's classes",
        f"{MEGATRON}#7452 (2)",
        programs.some_classes,
        "`output_layouts=Replicate()`, or `loss_parallel`",
    ),
    Report("mean over a rank's tokens", f"{MEGATRON}#673, #906", programs.some_tokens, "`token_mean`"),
    Report(
        "positions of a part of the sequence",
        "deepspeedai/Megatron-DeepSpeed#392, vllm-project/speculators#871",
        programs.positions,
        "positions added before the cut",
    ),
    Report("labels shifted in a part", f"{HF}#36607, #48563", programs.label_shift, "a shift before the cut"),
    Report("number from a part's size", "NVIDIA/Megatron-LM#5047", programs.scale_of_a_part, "the model's own size"),
    Report(
        "tied weights",
        "foundation-model-stack/foundation-model-stack#331, tenstorrent/tt-metal#51428",
        programs.tied_weights,
    ),
    Report("vocabulary that ranks do not divide", f"{MEGATRON}#1754, sgl-project/sglang#31799", programs.vocabulary),
    Report("padding index of a cut vocabulary", f"{TITAN}#4637", lambda t: programs.vocabulary(t, 3)),
    Report("clipping of cut and whole parameters", f"meta-pytorch/torchtune#2420, {HF}#36132", programs.clipped),
    Report(
        "loss times the ranks of a tensor mesh",
        f"{HF}#45994, #39648",
        programs.loss_times_ranks,
        "a loss without the factor",
    ),
    Report(
        "norm that counts a gradient for each rank", f"{NEMO}#3788, ROCm/TransformerEngine#715", programs.total_norm
    ),
    Report("clipping adds its epsilon on each rank", f"{TORCH}#149768", programs.clipped_dtensors),
    Report("summand to local and back", f"{TORCH}#172932", programs.summand_to_local),
    Report(
        "weight to local, next to a part",
        f"{TITAN}#2532",
        programs.weight_to_local,
        "`to_local(grad_placements=[Partial()])`",
    ),
    Report(
        "experts' gradients of gathered tokens",
        f"NVIDIA-NeMo/Automodel#1260, {TORCH}#160285",
        programs.experts,
        "`full_tensor(grad_placements=[Partial()])`, or `ExpertParallel`",
    ),
    Report("replicated from local, into a cut layer", f"{TITAN}#2416, {TORCH}#175867", programs.replicated_from_local),
    Report("recomputed random numbers", f"allenai/OLMo-core#828, {TITAN}#1323", programs.recomputed),
    Report("the same random numbers for each part", "tenstorrent/tt-metal#55947", programs.drawn),
    Report("view that needs other elements", f"{TORCH}#179502", programs.view),
    Report("view of parts of unequal size", f"{TORCH}#143372", lambda t: programs.view(t, (5, 4), 0, (-1,))),
    Report("convolution of a part of the width", f"{TORCH}#191926", programs.convolution),
    Report("depthwise convolution of some channels", f"{TORCH}#186129", programs.depthwise),
    Report("number added to a summand", f"{TORCH}#163193, #145218", programs.summand_and_number),
    Report("place of the largest element", f"{TORCH}#168940, #173936", programs.largest),
    Report("products of a mean with numbers", f"{TORCH}#153603", programs.number_of_a_sum),
]
