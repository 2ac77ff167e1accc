from shardwise.attention import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from shardwise.attention import BigBirdSparsityConfig as BigBirdSparsityConfig
from shardwise.attention import DenseSparsityConfig as DenseSparsityConfig
from shardwise.attention import FixedSparsityConfig as FixedSparsityConfig
from shardwise.attention import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from shardwise.attention import SparsityConfig as SparsityConfig
from shardwise.attention import VariableSparsityConfig as VariableSparsityConfig

__all__ = ["BSLongformerSparsityConfig", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "SparsityConfig", "VariableSparsityConfig"]
