from deepspeed.runtime.domino import async_linear as async_linear
from deepspeed.runtime.domino import transformer as transformer

__all__ = ["async_linear", "transformer"]
