from shardwise_deepspeed.tuning import Autotuner as Autotuner

__all__ = ["Autotuner"]
