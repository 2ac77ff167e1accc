from deepspeed.runtime.comm import coalesced_collectives as coalesced_collectives
from deepspeed.runtime.comm import compressed as compressed
from deepspeed.runtime.comm import mpi as mpi
from deepspeed.runtime.comm import nccl as nccl

__all__ = ["coalesced_collectives", "compressed", "mpi", "nccl"]
