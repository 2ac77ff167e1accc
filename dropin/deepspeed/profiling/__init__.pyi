from deepspeed.profiling import config as config
from deepspeed.profiling import flops_profiler as flops_profiler

__all__ = ["config", "flops_profiler"]
