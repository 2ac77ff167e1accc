from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["VocabParallelCausalLMLoss", "VocabParallelCrossEntropyLoss", "configure_vocab_parallel_loss", "validate_vocab_parallel_loss", "vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]

@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
class VocabParallelCausalLMLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
class VocabParallelCrossEntropyLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def configure_vocab_parallel_loss(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def validate_vocab_parallel_loss(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_parallel_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('a divided vocabulary is requested by tensor_parallel.vocab_parallel_lm_head, for models of transformers')
def vocab_sequence_parallel_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
