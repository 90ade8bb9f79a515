"""`parallelize_model`."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.api import check_src_data_rank
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.integrations.huggingface.attention import fit_heads
from hyper_parallel.integrations.huggingface.between import fit_between
from hyper_parallel.integrations.huggingface.experts import slice_over, with_own_tokens
from hyper_parallel.integrations.huggingface.head import fit_head
from hyper_parallel.integrations.huggingface.lora import adapted_model, place_adapters, without_adapters
from hyper_parallel.integrations.huggingface.plans import named_plan, resolve_styles
from hyper_parallel.integrations.huggingface.sequences import check_cut, cut_sequences, meshes_of
from hyper_parallel.integrations.huggingface.shares import say_shares

__all__ = ["parallelize_model"]


def parallelize_model(
    model: Any,
    device_mesh: DeviceMesh | None = None,
    *,
    plan: dict[str, str | ParallelStyle | None] | None = None,
    gather_logits: bool = True,
    gather_heads: bool = False,
    expert_parallel: bool | DeviceMesh = False,
    balance: bool = True,
    src_data_rank: int | None = 0,
) -> Any:
    """Tensor-parallelise a transformers model in place, by the model's own plan.

    The model keeps its class, its methods (``generate``, ``gradient_checkpointing_enable``) and the keys of its state
    dict. Inputs, outputs and caches are plain tensors, equal on every rank. But in a cache, each rank holds only its
    local key and value heads. Parameters that the plan does not name stay plain, and must be equal on every rank.
    Random numbers must be equal too. The first model on a mesh gives all its ranks the generator state of the first
    rank.

    Args:
        model: a ``transformers.PreTrainedModel`` on a torch backend. Its architecture must have a tensor-parallel plan
            (``model.tp_plan``) or be known here, such as GPT-2, BERT, Whisper, CLIP or Mamba: the page on transformers
            lists them. LoRA adapters of peft are sharded with the layers that they adapt. A ``PeftModel`` is accepted
            too.
        device_mesh: 1-D mesh; None stands for the mesh entered with ``with mesh:``. A dimension ``"cp"`` shards
            sequences: alone, or together with tensor parallelism, as ``mesh["cp", "tp"]``. The model then takes the
            shards that `shard_sequence` returns, with ``position_ids`` and without ``labels``, and returns the logits
            of these shards.
        plan: changes to the model's plan: names of modules or parameters, with ``*`` for a layer's number, -> a style
            or its name; None removes the entry.
        gather_logits: whether the logits are plain full tensors on every rank. Otherwise they are DTensors sharded over
            the vocabulary, for a loss inside `hyper_parallel.loss_parallel`.
        gather_heads: for attention heads that the ranks cannot share evenly: with True every rank computes such
            attention in full, with sharded projections; False raises an error.
        expert_parallel: whether each rank has some full experts, by the model's own plan (``model.ep_plan``), or a
            shard of every expert. A 1-D mesh of the same root is for ranks with separate batches: its ranks have full
            experts, and send tokens to each other (`ExpertParallel`). If ``device_mesh`` is not part of that mesh, its
            ranks have shards of these experts. A mesh of torch stands for the slice with its ranks.
        balance: as for `shard_sequence`, if sequences are sharded.
        src_data_rank: rank of the mesh whose parameters all ranks get, including plain ones. None keeps each rank's
            local values and communicates nothing. Then values, and the generators' states, must be equal on all ranks.

    Returns:
        ``model``.

    Raises:
        TypeError: for a model that is not of transformers, and one that is quantised or sharded. ValueError: for a
            model without a plan, an unknown style, heads or experts that the ranks cannot share, unsupported adapters,
            a key of ``plan`` that matches nothing, and all that `parallelize_module` refuses. Nothing has been changed
            then.
            With sharded sequences, for layers that mix positions and are no known attention, and for models that read
            one position. In a call, for ``labels``, a mask that hides tokens, shards without ``position_ids``, and
            packed documents.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import parallelize_model
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> model = parallelize_model(LlamaForCausalLM(config), init_device_mesh("cpu", (1,)))
        >>> model.lm_head.weight.placements
        (Shard(dim=0),)

    Source: ``transformers.distributed.tensor_parallel.apply_tensor_parallelism``.
    """
    mesh = resolve_mesh(device_mesh, "parallelize_model")
    platform = bind_platform(mesh.platform)
    given, model = model, adapted_model(model)
    if not isinstance(model, platform.Module) or not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise TypeError(f"parallelize_model takes a model of transformers, got {type(model).__name__}")
    whole = mesh
    heads, sequences = meshes_of(whole)
    if heads is not None and heads.ndim != 1:
        raise ValueError(
            "parallelize_model needs a 1-D mesh, or a 2-D mesh with the dimension 'cp', got a mesh of shape "
            f"{whole.shape}: pass a slice such as mesh['tp'] or mesh['cp', 'tp']"
        )
    check_src_data_rank(src_data_rank, sequences or whole)
    if sequences is not None:
        check_cut(model, sequences)
    if heads is not None:
        _parallelize(model, heads, plan, gather_logits, gather_heads, expert_parallel, src_data_rank)
    if sequences is not None:
        cut_sequences(model, sequences, balance, src_data_rank)
    return given


def _parallelize(
    model: Any,
    mesh: DeviceMesh,
    plan: dict[str, str | ParallelStyle | None] | None,
    gather_logits: bool,
    gather_heads: bool,
    expert_parallel: Any,
    src_data_rank: int | None,
) -> None:
    """Apply the plan for tensor parallelism; arguments as for `parallelize_model`."""
    platform = mesh.platform
    check_src_data_rank(src_data_rank, mesh)
    modules = dict(platform.named_modules(model))
    _refuse_sharded(modules, mesh)
    _refuse_quantised(modules, mesh)
    plain, changes = without_adapters(modules), plan or {}
    named = named_plan(model, changes, mesh, expert_parallel=expert_parallel is not False)
    styles = resolve_styles(named, plain, changes, mesh)
    experts: dict[str, ParallelStyle] = {}
    if not isinstance(expert_parallel, bool):
        expert_parallel = slice_over(resolve_mesh(expert_parallel, "parallelize_model(expert_parallel=...)"), mesh)
        inside = resolve_styles(named_plan(model, changes, mesh), plain, changes, mesh)
        top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
        experts = with_own_tokens(styles, inside, mesh, expert_parallel, top_k)
    local_sizes = fit_heads(styles, plain, mesh, gather_heads=gather_heads)
    fit_between(model, styles, plain, mesh)
    fit_head(model, styles, plain, mesh, gather_logits=gather_logits)
    place_adapters(styles, modules, mesh)
    parallelize_module(model, mesh, dict(styles), src_data_rank=src_data_rank)
    if isinstance(expert_parallel, DeviceMesh):
        parallelize_module(model, expert_parallel, dict(experts), src_data_rank=src_data_rank)
    for module, attribute, size in local_sizes:
        setattr(module, attribute, size)
    _settle_rest(modules, mesh)
    say_shares(model, mesh)


def _refuse_sharded(modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise TypeError for a model that transformers sharded, with DTensors of torch."""
    platform = mesh.platform
    for path, module in modules.items():
        for name, parameter in platform.named_parameters(module):
            if platform.foreign_tensor(parameter) is not None:
                raise TypeError(
                    f"the model is sharded already: {f'{path}.{name}'.lstrip('.')!r} is a DTensor of torch. Load the "
                    "model without tp_plan and distributed_config, and call parallelize_model before torch's own "
                    "fully_shard"
                )


def _refuse_quantised(modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise TypeError for quantised weights, which are integers with separate scales. A shard of the integers is no
    shard of the matrix, and special kernels compute with them."""
    platform = mesh.platform
    for path, module in modules.items():
        for name, parameter in platform.named_parameters(module):
            kind = type(parameter).__module__.partition(".")[0]
            if kind in ("torchao", "bitsandbytes") or not platform.is_floating_point(parameter):
                where = f"{path}.{name}" if path else name
                raise TypeError(
                    f"the model is quantised: {where!r} is a {type(parameter).__name__} of {parameter.dtype}. "
                    "Parallelise the model in bfloat16: load the model without quantization_config, or call "
                    "model.dequantize() before parallelize_model"
                )


def _settle_rest(modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Move the tensors that stay plain to this rank's device."""
    platform = mesh.platform
    for module in modules.values():
        for _, parameter in platform.named_parameters(module):
            if not isinstance(parameter, DTensor) and not platform.is_meta(parameter):
                parameter.data = platform.to_device(parameter.detach())
        for name, buffer in list(platform.named_buffers(module)):
            if not isinstance(buffer, DTensor) and not platform.is_meta(buffer):
                platform.set_buffer(module, name, platform.to_device(buffer))
