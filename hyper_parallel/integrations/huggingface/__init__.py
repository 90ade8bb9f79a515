"""Models of Hugging Face's transformers, on the torch backends. `parallelize_model` applies a model's own plan.

transformers itself is not imported here: the caller has imported it to create the model.
"""

from hyper_parallel.integrations.huggingface.accelerator import parallelize_accelerator
from hyper_parallel.integrations.huggingface.api import parallelize_model
from hyper_parallel.integrations.huggingface.lora import parallelize_adapters
from hyper_parallel.integrations.huggingface.saving import full_state_dict, load_pretrained, save_pretrained
from hyper_parallel.integrations.huggingface.trainer import parallelize_trainer

__all__ = [
    "full_state_dict",
    "load_pretrained",
    "parallelize_accelerator",
    "parallelize_adapters",
    "parallelize_model",
    "parallelize_trainer",
    "save_pretrained",
]
