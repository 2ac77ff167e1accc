from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["write_experiments"]

@deprecated('the autotuner is not built yet')
def write_experiments(*args: Any, **kwargs: Any) -> NoReturn: ...
