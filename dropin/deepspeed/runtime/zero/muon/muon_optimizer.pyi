from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["MuonWithAuxAdam"]

@deprecated('Muon is `optimizer.type` Muon of the configuration, or `shardwise.optim.Muon`')
class MuonWithAuxAdam:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
