from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["TpTrainingManager"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class TpTrainingManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
