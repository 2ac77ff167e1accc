from deepspeed.sequence import cross_entropy as cross_entropy
from deepspeed.sequence import fpdt_layer as fpdt_layer
from deepspeed.sequence import layer as layer
from deepspeed.sequence import linear_cross_entropy as linear_cross_entropy
from deepspeed.sequence import vocab_parallel_ops as vocab_parallel_ops

__all__ = ["cross_entropy", "fpdt_layer", "layer", "linear_cross_entropy", "vocab_parallel_ops"]
