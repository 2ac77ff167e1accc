"""Checkpoints that DeepSpeed has written at ZeRO stages 0 to 3, read as if they were our own.

    files      one file of torch.save: checked, mapped, and read without running code
    directory  which files there are, which stage they are of, and what is missing
    layout     where in them each parameter and each entry of its optimizer state lies
    checkpoint all of it as a `shardwise.checkpoint.Checkpoint`

The layout of the files was found by saving with DeepSpeed 0.19.8 and looking at what it wrote;
`bench/deepspeed_import.py` repeats that for every stage and compares all values.
"""

from shardwise.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint, Target
from shardwise.checkpoint.deepspeed.directory import recognised

__all__ = ["DeepSpeedCheckpoint", "Target", "recognised"]
