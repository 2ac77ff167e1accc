from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.sparse_attention import bert_sparse_self_attention as bert_sparse_self_attention
from deepspeed.ops.sparse_attention import sparse_attention_utils as sparse_attention_utils
from deepspeed.ops.sparse_attention import sparse_self_attention as sparse_self_attention
from deepspeed.ops.sparse_attention import sparsity_config as sparsity_config

__all__ = ["BSLongformerSparsityConfig", "BertSparseSelfAttention", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "MatMul", "Softmax", "SparseAttentionUtils", "SparseSelfAttention", "SparsityConfig", "VariableSparsityConfig", "bert_sparse_self_attention", "sparse_attention_utils", "sparse_self_attention", "sparsity_config"]

@deprecated('sparse attention is not built yet')
class BSLongformerSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class BertSparseSelfAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class BigBirdSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class DenseSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class FixedSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class LocalSlidingWindowSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class MatMul:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class Softmax:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class SparseAttentionUtils:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class SparseSelfAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class SparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class VariableSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
