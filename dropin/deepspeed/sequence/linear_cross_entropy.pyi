from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["vocab_parallel_linear_cross_entropy"]

@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_parallel_linear_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
