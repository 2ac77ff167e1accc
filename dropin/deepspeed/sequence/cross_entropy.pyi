from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["VocabParallelCausalLMLoss", "VocabParallelCrossEntropyLoss", "configure_vocab_parallel_loss", "validate_vocab_parallel_loss", "vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]

@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
class VocabParallelCausalLMLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
class VocabParallelCrossEntropyLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def configure_vocab_parallel_loss(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def validate_vocab_parallel_loss(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_parallel_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_sequence_parallel_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
