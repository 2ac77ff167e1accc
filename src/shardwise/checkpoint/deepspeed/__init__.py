"""Reading checkpoints that DeepSpeed has written at ZeRO stages 0 to 3.

    files             one file of torch.save: checked, mapped, and read without running code
    directory         the files of a checkpoint, their stage, and missing ones
    experts           files with experts, and the experts' names
    zero_partitions   place of each parameter and its optimizer state
    stage0_optimizer  names of the numbered parameters in stage 0's optimizer
    tp_merge          merging the files of model-parallel ranks
    trainer_state     loss scale, schedule, counters
    checkpoint        all of it as a `shardwise.checkpoint.Checkpoint`

The file layout was found by saving with DeepSpeed 0.19.8 and looking at the output. `bench/deepspeed_import.py` repeats
that for every stage and compares all values.
"""

from shardwise.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint
from shardwise.checkpoint.deepspeed.directory import recognised
from shardwise.checkpoint.deepspeed.stage0_optimizer import Target
from shardwise.checkpoint.deepspeed.tp_merge import TargetParameter

__all__ = ["DeepSpeedCheckpoint", "Target", "TargetParameter", "recognised"]
