from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ActivationQuantConfig", "BaseQuantConfig", "DeepSpeedInferenceConfig", "DeepSpeedMoEConfig", "DeepSpeedTPConfig", "DtypeEnum", "InferenceCheckpointConfig", "MoETypeEnum", "QKVQuantConfig", "QuantTypeEnum", "QuantizationConfig", "WeightQuantConfig"]

@deprecated('inference is not built yet')
class ActivationQuantConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class BaseQuantConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DeepSpeedMoEConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DeepSpeedTPConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DtypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class InferenceCheckpointConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class MoETypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class QKVQuantConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class QuantTypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class QuantizationConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class WeightQuantConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
