from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.io import base_file_writer as base_file_writer
from deepspeed.io import base_io_buffer as base_io_buffer
from deepspeed.io import double_io_buffer as double_io_buffer
from deepspeed.io import fast_file_writer as fast_file_writer
from deepspeed.io import mock_file_writer as mock_file_writer
from deepspeed.io import py_file_writer as py_file_writer
from deepspeed.io import single_io_buffer as single_io_buffer
from deepspeed.io import utils as utils

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter", "base_file_writer", "base_io_buffer", "double_io_buffer", "fast_file_writer", "mock_file_writer", "py_file_writer", "single_io_buffer", "utils"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class FastFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class FastFileWriterConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class MockFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class PyFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
