from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["vocab_parallel_linear_cross_entropy"]

@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_parallel_linear_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
