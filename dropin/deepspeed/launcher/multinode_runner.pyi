from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner"]

@deprecated('processes are started by `shardwise run`, on one machine')
class IMPIRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class MPICHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class MVAPICHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class MultiNodeRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class OpenMPIRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class PDSHRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('processes are started by `shardwise run`, on one machine')
class SlurmRunner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
