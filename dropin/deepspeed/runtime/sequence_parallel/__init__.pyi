from deepspeed.runtime.sequence_parallel import parallel_state_sp as parallel_state_sp
from deepspeed.runtime.sequence_parallel import ulysses_sp as ulysses_sp

__all__ = ["parallel_state_sp", "ulysses_sp"]
