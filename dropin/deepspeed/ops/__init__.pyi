from deepspeed.ops import adagrad as adagrad
from deepspeed.ops import adam as adam
from deepspeed.ops import aio as aio
from deepspeed.ops import fp_quantizer as fp_quantizer
from deepspeed.ops import lamb as lamb
from deepspeed.ops import lion as lion
from deepspeed.ops import op_builder as op_builder
from deepspeed.ops import quantizer as quantizer
from deepspeed.ops import sparse_attention as sparse_attention
from deepspeed.ops import transformer as transformer
from shardwise_deepspeed.operators import COMPATIBLE_OPS as __compatible_ops__
from shardwise_deepspeed.operators import COMPATIBLE_OPS as __installed_ops__

__all__ = ["__compatible_ops__", "__installed_ops__", "adagrad", "adam", "aio", "fp_quantizer", "lamb", "lion", "op_builder", "quantizer", "sparse_attention", "transformer"]
