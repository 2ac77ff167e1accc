from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed import accelerator as accelerator
from deepspeed import autotuning as autotuning
from deepspeed import checkpoint as checkpoint
from deepspeed import checkpointing as checkpointing
from deepspeed import comm as comm
from deepspeed import compression as compression
from deepspeed import constants as constants
from deepspeed import datastates as datastates
from deepspeed import elasticity as elasticity
from deepspeed import env_report as env_report
from deepspeed import git_version_info as git_version_info
from deepspeed import inference as inference
from deepspeed import io as io
from deepspeed import launcher as launcher
from deepspeed import linear as linear
from deepspeed import model_implementations as model_implementations
from deepspeed import module_inject as module_inject
from deepspeed import moe as moe
from deepspeed import monitor as monitor
from deepspeed import nebula as nebula
from deepspeed import ops as ops
from deepspeed import pipe as pipe
from deepspeed import profiling as profiling
from deepspeed import runtime as runtime
from deepspeed import sequence as sequence
from deepspeed import utils as utils
from shardwise_deepspeed.configuration import DeepSpeedConfig as DeepSpeedConfig
from shardwise.errors import ConfigError as DeepSpeedConfigError
from shardwise.data import EngineDataLoader as DeepSpeedDataLoader
from shardwise_deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from shardwise_deepspeed.engine import DeepSpeedEngine as DeepSpeedHybridEngine
from shardwise.inference import InferenceConfig as DeepSpeedInferenceConfig
from shardwise_deepspeed.optimizers import DeepSpeedOptimizer as DeepSpeedOptimizer
from shardwise_deepspeed.optimizers import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
from shardwise_deepspeed.optimizers import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable
from shardwise_deepspeed.layers import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from shardwise_deepspeed.layers import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
from shardwise.inference import InferenceEngine as InferenceEngine
from shardwise_deepspeed.building import OnDevice as OnDevice
from shardwise_deepspeed.engine import PipelineEngine as PipelineEngine
from shardwise_deepspeed.engine import PipelineModule as PipelineModule
from shardwise_deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from shardwise_deepspeed.version import __git_branch__ as __git_branch__
from shardwise_deepspeed.version import __git_hash__ as __git_hash__
from shardwise_deepspeed.version import __version__ as __version__
from shardwise_deepspeed.version import __version_major__ as __version_major__
from shardwise_deepspeed.version import __version_minor__ as __version_minor__
from shardwise_deepspeed.version import __version_patch__ as __version_patch__
from shardwise_deepspeed.arguments import add_config_arguments as add_config_arguments
from shardwise_deepspeed.schedule_arguments import add_tuning_arguments as add_tuning_arguments
from shardwise.inference import default_inference_config as default_inference_config
from deepspeed import comm as dist
from shardwise_deepspeed.accelerator import get_accelerator as get_accelerator
from shardwise_deepspeed.version import git_branch as git_branch
from shardwise_deepspeed.version import git_hash as git_hash
from shardwise_deepspeed.clients import init_distributed as init_distributed
from shardwise.engine.inference import init_inference as init_inference
from shardwise_deepspeed.clients import initialize as initialize
from shardwise_deepspeed.clients import initialize as initialize_engine
from shardwise_deepspeed.helpers import is_compile_supported as is_compile_supported
from shardwise_deepspeed.configuration import load_ds_config as load_ds_config
from shardwise_deepspeed.logs import log_dist as log_dist
from shardwise_deepspeed.logs import logger as logger
from shardwise_deepspeed.tensors import set_autotp_mode as set_autotp_mode
from shardwise.parallel import tp_model_init as tp_model_init
from shardwise_deepspeed.version import version as version
from deepspeed.runtime import zero as zero

__all__ = ["ADAM_OPTIMIZER", "DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedDataLoader", "DeepSpeedEngine", "DeepSpeedHybridEngine", "DeepSpeedInferenceConfig", "DeepSpeedOptimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable", "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "DualPipeVEngine", "DualPipeVModule", "HAS_TRITON", "InferenceEngine", "LAMB_OPTIMIZER", "MUON_OPTIMIZER", "OnDevice", "PipelineEngine", "PipelineModule", "TORCH_DISTRIBUTED_DEFAULT_PORT", "__git_branch__", "__git_hash__", "__version__", "__version_major__", "__version_minor__", "__version_patch__", "accelerator", "add_config_arguments", "add_tuning_arguments", "autotuning", "checkpoint", "checkpointing", "comm", "compression", "constants", "datastates", "default_inference_config", "dist", "elasticity", "env_report", "get_accelerator", "git_branch", "git_hash", "git_version_info", "inference", "init_distributed", "init_inference", "initialize", "initialize_engine", "io", "is_compile_supported", "launcher", "linear", "load_ds_config", "log_dist", "logger", "merge_tp_model_init_into_config", "model_implementations", "module_inject", "moe", "monitor", "nebula", "ops", "pipe", "profiling", "record_tp_model_init_args", "replace_transformer_layer", "resolve_per_head_muon_after_sharding", "revert_transformer_layer", "runtime", "sequence", "set_autotp_mode", "set_optimizer_flags", "tp_model_init", "utils", "version", "zero"]

ADAM_OPTIMIZER: str
@deprecated('write the schedule into the configuration: `pipeline.schedule` "dualpipe-v" with a PipelineModule')
class DualPipeVEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('write the schedule into the configuration: `pipeline.schedule` "dualpipe-v" with a PipelineModule')
class DualPipeVModule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
HAS_TRITON: bool
LAMB_OPTIMIZER: str
MUON_OPTIMIZER: str
@deprecated('tp_model_init() divides the model at once: nothing is recorded for a configuration')
def merge_tp_model_init_into_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('tp_model_init() divides the model at once: nothing is recorded for a configuration')
def record_tp_model_init_args(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('layers are those of the model: build a DeepSpeedTransformerLayer in their place, or use engine.compile()')
def replace_transformer_layer(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def resolve_per_head_muon_after_sharding(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('layers are those of the model: build a DeepSpeedTransformerLayer in their place, or use engine.compile()')
def revert_transformer_layer(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('Muon is `optimizer.type` Muon of the configuration, or `shardwise.optim.Muon`')
def set_optimizer_flags(*args: Any, **kwargs: Any) -> NoReturn: ...
