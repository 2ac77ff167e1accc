from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.op_builder import all_ops as all_ops
from deepspeed.ops.op_builder import async_io as async_io
from deepspeed.ops.op_builder import builder as builder
from shardwise_deepspeed.operators import AsyncIOBuilder as AsyncIOBuilder
from shardwise_deepspeed.operators import CPUAdagradBuilder as CPUAdagradBuilder
from shardwise_deepspeed.operators import CPUAdamBuilder as CPUAdamBuilder
from shardwise_deepspeed.operators import CPULionBuilder as CPULionBuilder
from shardwise_deepspeed.operators import DeepCompileBuilder as DeepCompileBuilder
from shardwise_deepspeed.operators import EvoformerAttnBuilder as EvoformerAttnBuilder
from shardwise_deepspeed.operators import FPQuantizerBuilder as FPQuantizerBuilder
from shardwise_deepspeed.operators import FusedAdamBuilder as FusedAdamBuilder
from shardwise_deepspeed.operators import FusedLambBuilder as FusedLambBuilder
from shardwise_deepspeed.operators import FusedLionBuilder as FusedLionBuilder
from shardwise_deepspeed.operators import GDSBuilder as GDSBuilder
from shardwise_deepspeed.operators import InferenceBuilder as InferenceBuilder
from shardwise_deepspeed.operators import InferenceCoreBuilder as InferenceCoreBuilder
from shardwise_deepspeed.operators import InferenceCutlassBuilder as InferenceCutlassBuilder
from shardwise_deepspeed.operators import OpBuilder as OpBuilder
from shardwise_deepspeed.operators import PinMemoryBuilder as PinMemoryBuilder
from shardwise_deepspeed.operators import QuantizerBuilder as QuantizerBuilder
from shardwise_deepspeed.operators import RaggedOpsBuilder as RaggedOpsBuilder
from shardwise_deepspeed.operators import RaggedUtilsBuilder as RaggedUtilsBuilder
from shardwise_deepspeed.operators import RandomLTDBuilder as RandomLTDBuilder
from shardwise_deepspeed.operators import SparseAttnBuilder as SparseAttnBuilder
from shardwise_deepspeed.operators import SpatialInferenceBuilder as SpatialInferenceBuilder
from shardwise_deepspeed.operators import StochasticTransformerBuilder as StochasticTransformerBuilder
from shardwise_deepspeed.operators import TransformerBuilder as TransformerBuilder
from shardwise_deepspeed.operators import UtilsBuilder as UtilsBuilder

__all__ = ["AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "DeepCompileBuilder", "EvoformerAttnBuilder", "FPQuantizerBuilder", "FusedAdamBuilder", "FusedLambBuilder", "FusedLionBuilder", "GDSBuilder", "InferenceBuilder", "InferenceCoreBuilder", "InferenceCutlassBuilder", "OpBuilder", "PinMemoryBuilder", "QuantizerBuilder", "RaggedOpsBuilder", "RaggedUtilsBuilder", "RandomLTDBuilder", "SparseAttnBuilder", "SpatialInferenceBuilder", "StochasticTransformerBuilder", "TransformerBuilder", "UtilsBuilder", "__deepspeed__", "all_ops", "async_io", "builder", "builder_closure", "get_default_compute_capabilities"]

__deepspeed__: object
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def builder_closure(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('there are no operators to build: everything runs in plain torch')
def get_default_compute_capabilities(*args: Any, **kwargs: Any) -> NoReturn: ...
