"""Names of ``torch.distributed.checkpoint.state_dict``."""

from hyper_parallel.integrations.torch.state_dict_values import StateDictOptions
from hyper_parallel.integrations.torch.state_dicts import (
    IncompatibleKeys,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "IncompatibleKeys",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
