from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.autotuning import autotuner as autotuner
from deepspeed.autotuning import config as config
from deepspeed.autotuning import scheduler as scheduler
from deepspeed.autotuning import utils as utils

__all__ = ["Autotuner", "autotuner", "config", "scheduler", "utils"]

@deprecated('the autotuner is not built yet')
class Autotuner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
