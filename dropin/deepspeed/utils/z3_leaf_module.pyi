from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.zero.units.leaves import get_z3_leaf_modules as get_z3_leaf_modules
from shardwise.zero.units.leaves import set_z3_leaf_module as set_z3_leaf_module
from shardwise.zero.units.leaves import set_z3_leaf_modules as set_z3_leaf_modules
from shardwise.zero.units.leaves import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from shardwise.zero.units.leaves import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from shardwise.zero.units.leaves import unset_z3_leaf_modules as unset_z3_leaf_modules
from shardwise.zero.units.leaves import z3_leaf_module as z3_leaf_module

__all__ = ["apply_zero_leaf_module_config", "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def apply_zero_leaf_module_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def z3_leaf_parameter(*args: Any, **kwargs: Any) -> NoReturn: ...
