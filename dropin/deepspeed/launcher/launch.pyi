from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["main"]

@deprecated('processes are started by `shardwise run`, on one machine or several')
def main(*args: Any, **kwargs: Any) -> NoReturn: ...
