from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["all_to_all_loco_quant_reduce", "all_to_all_quant_reduce", "reduce_scatter_coalesced"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def all_to_all_loco_quant_reduce(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def all_to_all_quant_reduce(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def reduce_scatter_coalesced(*args: Any, **kwargs: Any) -> NoReturn: ...
