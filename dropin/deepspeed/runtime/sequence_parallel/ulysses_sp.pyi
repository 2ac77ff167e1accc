from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.sequences import SequenceTiledCompute as SequenceTiledCompute
from shardwise_deepspeed.sequences import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from shardwise_deepspeed.sequences import TiledMLP as TiledMLP
from shardwise_deepspeed.sequences import UlyssesSPAttentionHF as UlyssesSPAttentionHF
from shardwise_deepspeed.sequences import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter
from shardwise.parallel import sequence_tiled_compute as sequence_tiled_compute

__all__ = ["AutogradComputeMLP", "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "sequence_tiled_compute"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class AutogradComputeMLP:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
