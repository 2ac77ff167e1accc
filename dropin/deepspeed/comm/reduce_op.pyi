from torch.distributed import ReduceOp as ReduceOp

__all__ = ["ReduceOp"]
