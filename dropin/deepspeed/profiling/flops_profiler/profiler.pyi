from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.profile import FlopsProfiler as FlopsProfiler
from shardwise.profile.words import bytes_to_string as bytes_to_string
from shardwise.profile.words import duration_to_string as duration_to_string
from shardwise.profile.words import flops_to_string as flops_to_string
from shardwise.profile import get_model_profile as get_model_profile
from shardwise.profile.words import macs_to_string as macs_to_string
from shardwise.profile.words import number_to_string as number_to_string
from shardwise.profile.words import params_to_string as params_to_string

__all__ = ["FlopsProfiler", "bytes_to_string", "duration_to_string", "flops_to_string", "get_model_profile", "get_module_duration", "get_module_flops", "get_module_macs", "macs_to_string", "number_to_string", "params_to_string", "wrapFunc"]

@deprecated('nothing is put on modules: FlopsProfiler(...).profile has what each of them computes')
def get_module_duration(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('nothing is put on modules: FlopsProfiler(...).profile has what each of them computes')
def get_module_flops(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('nothing is put on modules: FlopsProfiler(...).profile has what each of them computes')
def get_module_macs(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def wrapFunc(*args: Any, **kwargs: Any) -> NoReturn: ...
