from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["vocab_parallel_entropy", "vocab_parallel_kl_div", "vocab_parallel_logprobs"]

@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_parallel_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_parallel_kl_div(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_parallel_logprobs(*args: Any, **kwargs: Any) -> NoReturn: ...
