"""Reading checkpoints that DeepSpeed has written at ZeRO stages 0 to 3; `checkpoint` joins the parts.

The file layout was found by saving with DeepSpeed 0.19.8 and looking at the output. `tests/slow/deepspeed_import.py`
repeats that for every stage and compares all values.
"""

from shardwise.checkpoint.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from shardwise.checkpoint.formats.deepspeed.index import recognised
from shardwise.checkpoint.formats.deepspeed.tp_merge import TargetParameter
from shardwise.checkpoint.formats.deepspeed.zero_partitions import Target

__all__ = ["DeepSpeedCheckpoint", "Target", "TargetParameter", "recognised"]
