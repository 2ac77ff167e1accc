from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DataAnalyzer", "Dist", "DistributedDataAnalyzer"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class DataAnalyzer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class Dist:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class DistributedDataAnalyzer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
