from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["bsh_decoder_gather", "bsh_decoder_scatter"]

@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def bsh_decoder_gather(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def bsh_decoder_scatter(*args: Any, **kwargs: Any) -> NoReturn: ...
