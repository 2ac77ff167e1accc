from deepspeed.launcher import constants as constants
from deepspeed.launcher import launch as launch
from deepspeed.launcher import multinode_runner as multinode_runner
from deepspeed.launcher import runner as runner

__all__ = ["constants", "launch", "multinode_runner", "runner"]
