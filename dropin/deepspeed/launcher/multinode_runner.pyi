from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner"]

@deprecated('processes are started by `shardwise run`, on one machine or several')
class IMPIRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class MPICHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class MVAPICHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class MultiNodeRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class OpenMPIRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class PDSHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
class SlurmRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
