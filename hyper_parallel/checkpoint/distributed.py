"""Names of ``torch.distributed.checkpoint``."""

from hyper_parallel.integrations.torch.distributed_checkpoint import (
    CheckpointException,
    Stateful,
    async_save,
    load,
    save,
)

__all__ = ["CheckpointException", "Stateful", "async_save", "load", "save"]
