from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.operators import OpBuilder as _OpBuilder

__all__ = ["AsyncIOBuilder"]

class AsyncIOBuilder(_OpBuilder): ...
