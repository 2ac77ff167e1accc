from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.runtime.checkpoint_engine import checkpoint_engine as checkpoint_engine
from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as datastates_checkpoint_engine
from deepspeed.runtime.checkpoint_engine import decoupled_checkpoint_engine as decoupled_checkpoint_engine
from deepspeed.runtime.checkpoint_engine import fast_checkpoint_engine as fast_checkpoint_engine
from deepspeed.runtime.checkpoint_engine import nebula_checkpoint_engine as nebula_checkpoint_engine
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine as torch_checkpoint_engine
from deepspeed.runtime.checkpoint_engine import utils as utils

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "DecoupledCheckpointEngine", "FastCheckpointEngine", "TorchCheckpointEngine", "checkpoint_engine", "create_checkpoint_engine", "datastates_checkpoint_engine", "decoupled_checkpoint_engine", "fast_checkpoint_engine", "nebula_checkpoint_engine", "torch_checkpoint_engine", "utils"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class CheckpointCommitInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class CheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class DecoupledCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class FastCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class TorchCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
def create_checkpoint_engine(*args: Any, **kwargs: Any) -> NoReturn: ...
