"""LoRA adapters for the tests: those of peft where it is installed, else layers of the same structure."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

RANK = 3


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter, under the names that peft gives."""

    def __init__(self, base: nn.Module, dropout: float) -> None:
        super().__init__()
        out_features, in_features = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        down, up = nn.Linear(in_features, RANK, bias=False), nn.Linear(RANK, out_features, bias=False)
        self.lora_A = nn.ModuleDict({"default": down.to(base.weight.device)})
        self.lora_B = nn.ModuleDict({"default": up.to(base.weight.device)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add twice the adapter's output to that of the layer."""
        y = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + y * 2.0


def adapted(model: Any, names: list[str], dropout: float = 0.0) -> Any:
    """``model`` with adapters on all layers of these names; only the adapters are trained."""
    torch.manual_seed(2)
    if find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=dropout, target_modules=names)
        )
    else:
        model.requires_grad_(False)
        for path, module in list(model.named_modules()):
            above, _, name = path.rpartition(".")
            if name in names:
                setattr(model.get_submodule(above), name, Adapted(module, dropout))
    with torch.no_grad():  # B begins as zeros, which hide mistakes
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model
