"""Ray Train: gives checkpoints of an engine to Ray, and resumes after Ray has started the workers again.

    def train_loop(settings):
        engine, *_ = shardwise.initialize(model=model, config=config)
        state = shardwise.ray.resume(engine) or {"epoch": 0}
        ...
        shardwise.ray.report(engine, {"loss": loss.item()}, client_state=state)

    TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=8, use_gpu=True), run_config=run_config).fit()

Ray starts the workers and their process group, which `initialize` uses. All ranks write one checkpoint in the run's
directory (`RunConfig(storage_path=..., name=...)`), which all workers must see; Ray copies nothing.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.errors import UsageError

if TYPE_CHECKING:
    from shardwise.engine import Engine

__all__ = ["report", "resume"]


def report(
    engine: Engine,
    metrics: Mapping[str, Any],
    *,
    checkpoint: bool = True,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Report metrics to Ray, with a checkpoint of the engine. All workers call, in the function of a `TorchTrainer`.

    The checkpoint is `global_step<N>` in the run's directory (`global_step<N>-2` where that exists), saved before Ray
    knows it. Ray removes old ones: `CheckpointConfig(num_to_keep=...)`.

    Args:
        engine: of `shardwise.initialize`.
        metrics: numbers and text. Ray keeps those of rank 0, and its checkpoint scores are among them.
        checkpoint: False reports metrics only.
        client_state: the script's state, as for `engine.save_checkpoint`; `resume` returns it.

    Raises:
        UsageError: Ray is not installed or too old; the run's directory is not in a file system; or
            `checkpoint.keep_last` is set.
        CheckpointError: the checkpoint could not be written, on all workers alike.
        RuntimeError: the caller is not a worker of Ray Train.
    """
    train = _ray_train()
    if not checkpoint:
        train.report(dict(metrics))
        return
    directory = _directory(train, engine)
    tag = _unused(directory, engine.global_steps)
    engine.save_checkpoint(directory, tag, client_state, asynchronous=False)
    # One worker names it, because Ray takes one name only.
    made = train.Checkpoint.from_directory(os.path.join(directory, tag)) if engine.global_rank == 0 else None
    train.report(dict(metrics), checkpoint=made, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)


def resume(engine: Engine) -> dict[str, Any] | None:
    """Load the newest complete state of this run. All workers call, before the training loop.

    It is `engine.resume` on the run's directory. Workers that Ray starts again after a failure
    (`FailureConfig(max_failures=...)`) continue, and so does a later run with the same `storage_path` and `name`. The
    state may be newer than `ray.train.get_checkpoint()`, which lacks a checkpoint whose report was on its way.

    Returns:
        The `client_state` of that state; None in a new run.

    Raises:
        UsageError: as for `report`.
        CheckpointError: as for `engine.resume`.
        RuntimeError: the caller is not a worker of Ray Train.
    """
    return engine.resume(_directory(_ray_train(), engine))


def _ray_train() -> Any:
    try:
        train = importlib.import_module("ray.train")
    except ImportError as error:
        raise UsageError(f'shardwise.ray cannot import Ray Train ({error}); `pip install "ray[train]"`') from error
    if not hasattr(train, "CheckpointUploadMode"):
        raise UsageError(
            "shardwise.ray: this Ray Train takes no checkpoint that is in place. Install ray 2.51 or newer, and leave "
            "RAY_TRAIN_V2_ENABLED unset"
        )
    return train


def _directory(train: Any, engine: Engine) -> str:
    """Return the directory of the run, which Ray has made; a UsageError if no checkpoint can be kept there."""
    storage = train.get_context().get_storage()
    kind, path = storage.storage_filesystem.type_name, str(storage.experiment_fs_path)
    if kind != "local":
        raise UsageError(
            f"shardwise.ray: RunConfig(storage_path) is storage of type {kind!r} ({path}), but all ranks write one "
            "checkpoint, which takes a file system. Give a directory that all workers see, such as one on NFS"
        )
    if (engine.config.get("checkpoint") or {}).get("keep_last") is not None:
        raise UsageError(
            "checkpoint.keep_last removes checkpoints that Ray counts on; leave it out, and set "
            "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
        )
    return path


def _unused(directory: str, step: int) -> str:
    """Return a tag without a directory; Ray would remove an older report's directory with the newer one in it."""
    names = itertools.chain([f"global_step{step}"], (f"global_step{step}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(os.path.join(directory, name)))
