from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["vocab_parallel_entropy", "vocab_parallel_kl_div", "vocab_parallel_logprobs"]

@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_parallel_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_parallel_kl_div(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)')
def vocab_parallel_logprobs(*args: Any, **kwargs: Any) -> NoReturn: ...
