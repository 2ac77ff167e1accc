"""Result of `AsyncIOBuilder().load()`: asynchronous reading and writing of files."""

from shardwise.offload.named import FileHandle as aio_handle

__all__ = ["aio_handle"]
