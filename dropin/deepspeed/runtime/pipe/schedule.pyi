from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BackwardPass", "BufferOpInstruction", "CommitP2P", "DataParallelSchedule", "DualPipeVSchedule", "ForwardPass", "InferenceSchedule", "LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad", "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule"]

@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class BackwardPass:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class BufferOpInstruction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class CommitP2P:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class DataParallelSchedule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class DualPipeVSchedule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class ForwardPass:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class InferenceSchedule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class LoadMicroBatch:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class OptimizerStep:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class PipeInstruction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class PipeSchedule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class RecvActivation:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class RecvGrad:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class ReduceGrads:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class ReduceTiedGrads:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class SendActivation:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class SendGrad:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class TrainSchedule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
