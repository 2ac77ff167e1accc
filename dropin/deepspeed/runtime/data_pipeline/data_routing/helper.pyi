from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def convert_to_random_ltd(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def remove_random_ltd_state_dict(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def save_without_random_ltd(*args: Any, **kwargs: Any) -> NoReturn: ...
