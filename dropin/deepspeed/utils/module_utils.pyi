from shardwise_deepspeed.helpers import recursive_getattr as recursive_getattr
from shardwise_deepspeed.helpers import recursive_setattr as recursive_setattr

__all__ = ["recursive_getattr", "recursive_setattr"]
