from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DualPipeVEngine", "DualPipeVModule"]

@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class DualPipeVEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), and the messages between stages may have any form")
class DualPipeVModule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
