from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CreateLossScaler", "DELAYED_SHIFT", "DynamicLossScaler", "INITIAL_LOSS_SCALE", "LossScaleConfig", "LossScaleProfile", "LossScaleProfileDefaults", "LossScaler", "LossScalerBase", "MIN_LOSS_SCALE", "SCALE_WINDOW", "to_python_float"]

@deprecated("the loss scale is the engine's (engine.cur_scale, section fp16)")
class CreateLossScaler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
DELAYED_SHIFT: object
@deprecated("the loss scale is the engine's (engine.cur_scale, section fp16)")
class DynamicLossScaler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
INITIAL_LOSS_SCALE: object
@deprecated("the loss scale is the engine's (engine.cur_scale, section fp16)")
class LossScaleConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class LossScaleProfile:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class LossScaleProfileDefaults:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("the loss scale is the engine's (engine.cur_scale, section fp16)")
class LossScaler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("the loss scale is the engine's (engine.cur_scale, section fp16)")
class LossScalerBase:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
MIN_LOSS_SCALE: object
SCALE_WINDOW: object
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def to_python_float(*args: Any, **kwargs: Any) -> NoReturn: ...
