from deepspeed.runtime.fp16.onebit import adam as adam
from deepspeed.runtime.fp16.onebit import lamb as lamb
from deepspeed.runtime.fp16.onebit import zoadam as zoadam
from shardwise.optim import OnebitAdam as OnebitAdam
from shardwise.optim import OnebitLamb as OnebitLamb
from shardwise.optim import ZeroOneAdam as ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "adam", "lamb", "zoadam"]
