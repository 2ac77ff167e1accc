from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.sparse_attention import bert_sparse_self_attention as bert_sparse_self_attention
from deepspeed.ops.sparse_attention import sparse_attention_utils as sparse_attention_utils
from deepspeed.ops.sparse_attention import sparse_self_attention as sparse_self_attention
from deepspeed.ops.sparse_attention import sparsity_config as sparsity_config
from shardwise.attention import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from shardwise_deepspeed.sparse import BertSparseSelfAttention as BertSparseSelfAttention
from shardwise.attention import BigBirdSparsityConfig as BigBirdSparsityConfig
from shardwise.attention import DenseSparsityConfig as DenseSparsityConfig
from shardwise.attention import FixedSparsityConfig as FixedSparsityConfig
from shardwise.attention import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from shardwise_deepspeed.sparse import SparseAttentionUtils as SparseAttentionUtils
from shardwise.attention import SparseSelfAttention as SparseSelfAttention
from shardwise.attention import SparsityConfig as SparsityConfig
from shardwise.attention import VariableSparsityConfig as VariableSparsityConfig

__all__ = ["BSLongformerSparsityConfig", "BertSparseSelfAttention", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "MatMul", "Softmax", "SparseAttentionUtils", "SparseSelfAttention", "SparsityConfig", "VariableSparsityConfig", "bert_sparse_self_attention", "sparse_attention_utils", "sparse_self_attention", "sparsity_config"]

@deprecated('the layout and the blocks of a product are parts of shardwise.attention.SparseSelfAttention, which has no kernels to call')
class MatMul:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('the layout and the blocks of a product are parts of shardwise.attention.SparseSelfAttention, which has no kernels to call')
class Softmax:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
