from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3", "adamw"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ZenFlowSelectiveAdamW:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ZenFlowSelectiveAdamW_stage3:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def adamw(*args: Any, **kwargs: Any) -> NoReturn: ...
