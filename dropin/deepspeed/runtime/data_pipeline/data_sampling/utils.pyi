from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["close_mmap_dataset_builder", "create_mmap_dataset_builder", "find_fit_int_dtype", "split_dataset", "split_index"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def close_mmap_dataset_builder(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def create_mmap_dataset_builder(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def find_fit_int_dtype(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def split_dataset(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def split_index(*args: Any, **kwargs: Any) -> NoReturn: ...
