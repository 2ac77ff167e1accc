"""Checkpoints that DeepSpeed has written at ZeRO stages 0 to 3, read as if they were our own.

    files      one file of torch.save: checked, mapped, and read without running code
    directory  which files there are, which stage they are of, and what is missing
    experts    which of them have experts, and under which names
    layout     where in them each parameter and each entry of its optimizer state lies
    numbered   which parameters the optimizer of stage 0 has, whose file only numbers them
    joining    how model-parallel ranks divided parameters, and their files as one checkpoint
    checkpoint all of it as a `shardwise.checkpoint.Checkpoint`

The layout of the files was found by saving with DeepSpeed 0.19.8 and looking at what it wrote;
`bench/deepspeed_import.py` repeats that for every stage and compares all values.
"""

from shardwise.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint
from shardwise.checkpoint.deepspeed.directory import recognised
from shardwise.checkpoint.deepspeed.stage0_optimizer import Target
from shardwise.checkpoint.deepspeed.tp_merge import Whole

__all__ = ["DeepSpeedCheckpoint", "Target", "Whole", "recognised"]
