from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from shardwise_deepspeed.engine import PipelineEngine as PipelineEngine
from shardwise_deepspeed.engine import PipelineModule as PipelineModule

__all__ = ["BATCH_INPUT_TIMER", "DeepSpeedEngine", "PIPE_RECV_GRAD_TIMER", "PIPE_RECV_INPUT_TIMER", "PIPE_SEND_GRAD_TIMER", "PIPE_SEND_OUTPUT_TIMER", "PipelineEngine", "PipelineModule", "TRAIN_BATCH_TIMER", "_tensor_bytes", "is_even"]

BATCH_INPUT_TIMER: object
PIPE_RECV_GRAD_TIMER: object
PIPE_RECV_INPUT_TIMER: object
PIPE_SEND_GRAD_TIMER: object
PIPE_SEND_OUTPUT_TIMER: object
TRAIN_BATCH_TIMER: object
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
def _tensor_bytes(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
def is_even(*args: Any, **kwargs: Any) -> NoReturn: ...
