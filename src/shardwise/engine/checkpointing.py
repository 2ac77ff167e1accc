"""Saving and loading of an engine: what its state is, and the names that existing scripts call.

The files are the business of `shardwise.checkpoint`. Here the state of the engine's parts is put together and
handed back: counters, schedule, loss scaler, place in the data, random number generators.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import directory, rng, weights
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.collect import TrainingState
from shardwise.checkpoint.load import Loaded, Options, find, read
from shardwise.checkpoint.manifest import Manifest, name_of
from shardwise.checkpoint.report import LoadReport
from shardwise.checkpoint.save import SaveRequest, save
from shardwise.checkpoint.selection import Patterns, Rename, Selection
from shardwise.checkpoint.weightfiles import parse_size
from shardwise.config import effective
from shardwise.engine.background import BackgroundSaving, check_same_way, size_of, statistics
from shardwise.engine.importing import check_schedule, opener
from shardwise.engine.scaling import on_non_finite
from shardwise.errors import CheckpointError, UsageError
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from torch import nn

    from shardwise.checkpoint.reader import Checkpoint
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.precision.scaler import LossScaler
    from shardwise.zero.model import ShardedModel

CustomLoad = Callable[..., None]
"""Called as `custom_load_fn(src=state_dict, dst=module)`."""

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
_WINDOW = "gradient_accumulation_steps"


class Checkpointing(BackgroundSaving):
    """Mixin of `Engine`: saving and loading. Every method is called by all ranks together, and raises a `UsageError`
    once the engine has been destroyed.

    Attributes:
        last_load: what the last `load_checkpoint` has done, and what differed; None before.
    """

    last_load: LoadReport | None = None
    _notes: tuple[str, ...] = ()

    module: nn.Module
    sharded: ShardedModel
    device: torch.device
    lr_scheduler: Any
    training_dataloader: Any
    loss_scaler: LossScaler | None
    global_steps: int
    micro_steps: int
    skipped_steps: int
    global_samples: int
    _window_began: int
    _comm: Communicator
    _resolution: Resolution

    if TYPE_CHECKING:  # defined by another mixin

        def gradient_accumulation_steps(self) -> int:
            """Return the number of micro-batches in one step."""

        def _hear_before(self) -> None:
            """Learn what the ranks have said at the last step."""

        def drop_gradients(self) -> None:
            """Forget the gradients that the engine has accumulated."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
    ) -> bool:
        """Save everything that is needed to go on exactly: `<save_dir>/<tag>/`.

        Parameters are saved as master weights. Besides them: optimizer state, buffers, schedule, loss scaler,
        counters, place in the training data, and every rank's random number generators. The directory appears whole
        or not at all, also where one of this name exists.

        Values that are infinite or NaN are said in the log, and the checkpoint is marked: `resume` prefers the last one
        without, which `checkpoint.keep_last` does not remove. With `non_finite` "skip" or "stop" `latest` goes on
        naming the one before.

        In the middle of an accumulation window the gradients so far are not saved, which the log says: whoever goes on
        from the checkpoint begins the window anew, with the micro-batches that follow.

        An asynchronous save returns when the state has been copied, and another process writes it; see
        `wait_for_checkpoint`. If the one before is still being written, it is waited for first. On CUDA the device goes
        on copying: the next `step()` comes behind that. Until then master weights and optimizer state must not be
        changed but through this library (`safe_set_full_fp32_param` and the like); parameters may be.

        Args:
            save_dir: directory of the run's checkpoints; on a file system that all ranks share. Rank 0's counts.
            tag: name of this checkpoint; `global_step<N>` if None.
            client_state: state of the script: nested lists, tuples and dictionaries of None, bool, int, float, str,
                bytes, tensors and numpy arrays. Rank 0's is saved.
            save_latest: let the file `latest` name this checkpoint.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            asynchronous: write while training goes on; None: as `checkpoint.async_save` says. The same on every rank.

        Returns:
            True.

        Raises:
            CheckpointPathError: `save_dir` or `tag` cannot be used (a ValueError).
            UsageError: ranks differ in `asynchronous`, or the engine does not span all processes.
            CheckpointError: something in `client_state` cannot be saved, or writing failed on some rank. Raised on all
                ranks; earlier checkpoints are unchanged, unless the message says that this one is complete and that
                only `latest` could not be written. Also if the asynchronous save before has failed, which the message
                names: this one has then not begun, and may be called again.

        Example:
            >>> import shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            ... )
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory, client_state={"epoch": 3})
            True
            >>> path, client_state = engine.load_checkpoint(directory)
            >>> path.removeprefix(directory), client_state
            ('/global_step0', {'epoch': 3})
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.save_checkpoint()")
        config = self._resolution.config
        begun_at = time.monotonic()
        waited = self._settle_save()
        self.sharded.hooks.settle()
        self._hear_before()
        background = config.checkpoint.in_background if asynchronous is None else bool(asynchronous)
        with phase(self._comm, "save_checkpoint") as begun:
            parent = directory.check_directory(save_dir, "save_dir")
            request = SaveRequest(
                directory=parent,
                tag=directory.check_tag(f"global_step{self.global_steps}" if tag is None else tag),
                latest=save_latest,
                excluded=self._excluded(exclude_frozen_parameters),
                layout={"stage": self.sharded.plan.stage, "dtype": self._dtype_name()},
                config=effective(self._resolution),
                tag_validation=config.checkpoint.tag_validation,
                direct=config.checkpoint.writes_directly(background=background),
                keep_last=config.checkpoint.keep_last,
                keep_every=config.checkpoint.keep_every,
                check_finite=config.non_finite != "ignore",
                latest_if_not_finite=on_non_finite(config) in ("warn", "ignore"),
            )
            self._check_can_save()
            self._tell_of_window()
            state = self._training_state({} if client_state is None else dict(client_state))
            begun.said = [parent, background]
        request = replace(request, directory=_one_directory([said[0] for said in begun.heard], self._comm.rank))
        check_same_way([said[1] for said in begun.heard])
        if background:
            self._save_in_background(request, state, begun_at, waited)
            return True
        path = save(self.sharded, request, state)
        if self._comm.rank == 0 and self._shows_statistics():
            logger.info("%s", statistics(path, size_of(path), time.monotonic() - begun_at - waited))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        rename: Rename | None = None,
        load_param_groups: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Bring a checkpoint back, whatever stage and number of ranks it was saved with.

        With the layout it was saved with, training then goes on bit by bit as if it had not stopped. Bytes are checked
        before anything is changed. What was loaded and what differed is in `engine.last_load`
        (`shardwise.checkpoint.LoadReport`), and logged if anything differed. Checkpoints of DeepSpeed are loaded as
        well; what they have and this engine cannot take over is logged.

        Args:
            load_dir: directory of the run's checkpoints.
            tag: which one; None: the one that `latest` names, or, if that is incomplete or damaged, the newest that
                is not (what is skipped and why is logged).
            load_module_strict: names of parameters and buffers must be the same in model and checkpoint, and every
                pattern and rule must match one. Otherwise what both have is loaded. Shapes must fit in any case.
            load_optimizer_states: also load optimizer state, settings of parameter groups, and the loss scale.
            load_lr_scheduler_states: also load the schedule.
            load_module_only: load parameters and buffers and nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters whole, in place
                of loading parameters by name.
            include: load only parameters and buffers (names in the model) that match one of these patterns, in which
                `*` is any text, `?` one character and `[ab]` one of some. Others keep their values.
            exclude: load none that match one of these.
            rename: names in the model for names in the checkpoint: a dictionary; a list of (regular expression,
                replacement), each applied to what those before it have left; or a function of the name.
            load_param_groups: with optimizer state, also load the settings of parameter groups (lr, weight_decay, ...),
                for which the groups must be as they were. False: this engine's settings are kept, and parameters may
                be in any groups.

        Returns:
            (path of the checkpoint, client_state), or (None, None) if `tag` is None and there is no `latest`.

        Raises:
            CheckpointPathError: `load_dir` or `tag` cannot be used.
            CheckpointError: there is no such checkpoint, it is incomplete, damaged, of another format or another model.
                If names or shapes do not fit, its attribute `report` has all of them.
            UsageError: an argument is not what it should be, or differs between ranks.

        See `save_checkpoint` for an example.
        """
        self.sharded.check_open("engine.load_checkpoint()")
        if self._saving is not None:
            self._saving.wait()  # if it has failed, that is raised where saving is the matter
        self.sharded.hooks.settle()
        with phase(self._comm, "load_checkpoint"):
            parent = directory.check_directory(load_dir, "load_dir")
            if custom_load_fn is not None and not (include is exclude is rename is None):
                raise UsageError(
                    "load_checkpoint(): custom_load_fn is given everything under the checkpoint's names; let it select "
                    "and rename, and remove include, exclude and rename"
                )
            options = Options(
                load_module_strict,
                load_optimizer_states,
                load_module_only,
                custom_load_fn is not None,
                load_param_groups,
                Selection.of(include, exclude, rename),
            )
            checked = None if tag is None else directory.check_tag(tag)
        return self._load(parent, checked, options, load_lr_scheduler_states, custom_load_fn)

    def _load(
        self,
        parent: str,
        tag: str | None,
        options: Options,
        load_lr_scheduler_states: bool,
        custom_load_fn: CustomLoad | None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        def check(saved: Checkpoint) -> None:
            with_scheduler = load_lr_scheduler_states and not options.module_only
            if not options.module_only:
                self._check_training_state(saved.manifest, saved.path, with_scheduler=with_scheduler)
            if with_scheduler and self.lr_scheduler is not None:
                check_schedule(saved, self.lr_scheduler)

        found = find(self.sharded, parent, tag, options, opener(self.sharded), check)
        if found is None:
            return None, None
        saved, matched = found
        self._notes = ()
        with saved:
            loaded = read(self.sharded, saved, matched, options)
            if custom_load_fn is not None:
                self._load_custom(custom_load_fn, saved.module_values())
        self.drop_gradients()
        if self.sharded.compressor is not None:
            self.sharded.compressor.clear()  # it is of gradients at other values
        if not loaded.manifest.finite:
            self._log(f"{loaded.path}: it was saved with values that are infinite or NaN, which are loaded")
        if not options.module_only:
            if saved.notes:
                self._log(f"{loaded.path}: not taken over: {'; '.join(saved.notes)}")
            with phase(self._comm, f"loading checkpoint {loaded.path}"):
                self._take_training_state(loaded, options, load_lr_scheduler_states)
        if self._comm.rank == 0 and (matched.report.differs or matched.report.notes):
            logger.warning("%s", matched.report)
        self.last_load = replace(matched.report, notes=matched.report.notes + self._notes)
        return loaded.path, loaded.client

    def _check_training_state(self, manifest: Manifest, path: str, *, with_scheduler: bool) -> None:
        """Raise if a checkpoint cannot bring back the state of this engine's parts."""
        if with_scheduler and self.lr_scheduler is not None and manifest.scheduler is None:
            raise CheckpointError(
                f"{path}: was saved without a learning-rate scheduler, and this engine has one, which would begin "
                "anew; pass load_lr_scheduler_states=False if that is meant"
            )
        absent = [name for name in (*_COUNTERS, _WINDOW) if name not in manifest.counters]
        if absent or not manifest.ranks:
            what = f"the counters {', '.join(absent)}" if absent else "the state of any rank"
            raise CheckpointError(
                f"{path}: was not saved by an engine: it does not have {what}; pass load_module_only=True to load the "
                "weights"
            )

    def _check_can_save(self) -> None:
        everyone = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if self._comm.world != everyone:
            raise UsageError(
                f"save_checkpoint(): this engine spans {self._comm.world} of {everyone} processes (mpu), and several "
                "engines cannot share a checkpoint in this version"
            )

    def _tell_of_window(self) -> None:
        if self.sharded.holds_gradients and self._comm.rank == 0:
            warn_once(
                "save_checkpoint(): in the middle of an accumulation window. Checkpoints hold no gradients: those of "
                "the window so far are not in it, and going on from it begins the window anew, with the micro-batches "
                "that follow. Save after the engine.step() that ends a window (every "
                f"{self.gradient_accumulation_steps()} micro-batches) to lose none"
            )

    def _excluded(self, frozen: bool) -> frozenset[int]:
        every = weights.wanted_parameters(self.sharded, exclude_frozen=False)
        return frozenset(every - weights.wanted_parameters(self.sharded, exclude_frozen=frozen))

    def _dtype_name(self) -> str:
        return name_of(self.sharded.policy.compute_dtype or torch.float32)

    def _training_state(self, client: dict[str, Any]) -> TrainingState:
        scheduler = self.lr_scheduler
        if scheduler is not None and not hasattr(scheduler, "state_dict"):
            raise CheckpointError(
                f"save_checkpoint(): the learning-rate scheduler {type(scheduler).__name__} has no state_dict(), so "
                "it could not go on where it was; give it state_dict() and load_state_dict()"
            )
        loader = self.training_dataloader
        return TrainingState(
            client=client,
            rank={
                "rng": rng.capture(self.device),
                "loader": None if loader is None else loader.state_dict(),
                "compression": self._kept(),
                "optimizer": self.sharded.rank_state(),
            },
            scheduler=None if scheduler is None else scheduler.state_dict(),
            scaler=None if self.loss_scaler is None else self.loss_scaler.state_dict(),
            counters={
                **{name: getattr(self, name) for name in _COUNTERS},
                # Whoever goes on from the middle of a window begins it anew.
                "micro_steps": self._window_began if self.sharded.holds_gradients else self.micro_steps,
                _WINDOW: self.gradient_accumulation_steps(),
            },
        )

    def _take_rank_state(self, loaded: Loaded) -> None:
        """Take over what the optimizer keeps on each rank alone, if there are the same ranks and the same layout."""
        same = loaded.first is None
        own = None if loaded.rank is None else loaded.rank.get("optimizer")
        if own is None and (same or loaded.first.get("optimizer") is None):
            return
        if not same or not self.sharded.load_rank_state(own):
            self._log(
                f"{loaded.path}: what each rank has not sent yet (the errors of compressed communication, and steps of "
                f"its own since the last average) is dropped, because it belongs to {len(loaded.manifest.ranks)} ranks "
                "and the layout it was saved with; training goes on from what all ranks agree on"
            )

    def _take_training_state(self, loaded: Loaded, options: Options, with_scheduler: bool) -> None:
        path, world = loaded.path, self._comm.world
        if with_scheduler and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded.scheduler)
        elif with_scheduler and loaded.scheduler is not None:
            self._log(f"{path}: holds the state of a learning-rate scheduler, and this engine has none")
        if options.optimizer and self.loss_scaler is not None and loaded.scaler is not None:
            self.loss_scaler.load_state_dict(loaded.scaler)
        if options.optimizer:
            self._take_rank_state(loaded)
        counters = loaded.manifest.counters
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        if counters[_WINDOW] != self.gradient_accumulation_steps():
            # Windows have another length now; begin one.
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self._window_began = self.micro_steps
        same = len(loaded.manifest.ranks) == world
        own = loaded.rank if loaded.rank is not None else loaded.first
        self._take_kept(own.get("compression") if options.optimizer else None, loaded)
        if self.training_dataloader is not None and own["loader"] is not None:
            self.training_dataloader.load_state_dict((own if same else loaded.first)["loader"])
        if not same and own["rng"] is not None:
            self._log(
                f"{path}: saved on {len(loaded.manifest.ranks)} ranks and loaded on {world}; random numbers "
                "continue on the ranks that both have"
            )
        self._compare_batches(loaded)
        if loaded.rank is not None and loaded.rank["rng"] is not None:
            # Last: nothing after this draws a number.
            rng.restore(loaded.rank["rng"], self.device)

    def _compare_batches(self, loaded: Loaded) -> None:
        before, now = loaded.manifest.config.get("train_batch_size"), self._resolution.config.train_batch_size
        if self.sharded.update is not None and before is not None and before != now:
            self._log(
                f"{loaded.path}: saved with {before} samples in a step (train_batch_size), and now there are {now}; "
                "learning rate and schedule are left as they are. To keep the batch when the number of ranks changes, "
                "give train_batch_size and train_micro_batch_size_per_gpu and leave gradient_accumulation_steps out"
            )

    @property
    def _method(self) -> str:
        """What reduces gradients with loss: a `compression.type`, or the key that has one of its own."""
        return self._resolution.config.compression.type or "zero_quantized_gradients"

    def _kept(self) -> dict[str, Any] | None:
        """Return what this rank's lossy reductions keep, with what it depends on."""
        compressor = self.sharded.compressor
        if compressor is None:
            return None
        return {"method": self._method, "layout": self.sharded.reduced_layout(), "kept": compressor.state_dict()}

    def _take_kept(self, saved: dict[str, Any] | None, loaded: Loaded) -> None:
        """Go on with what lossy reductions have kept, if this engine's would have kept it in the same places.

        The decision depends on nothing that could differ between ranks.
        """
        compressor = self.sharded.compressor
        if compressor is not None:
            compressor.steps = self.global_steps
        if saved is None:
            return
        if compressor is None:
            now = "no compression" if self._comm.world > 1 else "one rank, and nothing is sent"
            reason = f'it was kept by "{saved["method"]}", and there is {now}'
        elif saved["method"] != self._method:
            reason = f'it was kept by "{saved["method"]}", and the method is "{self._method}"'
        elif len(loaded.manifest.ranks) != self._comm.world:
            reason = f"{len(loaded.manifest.ranks)} ranks have kept it, and there are {self._comm.world}"
        elif saved["layout"] != self.sharded.reduced_layout():
            reason = "parameters are laid out in other units than they were"
        else:
            compressor.load_state_dict(saved["kept"])
            return
        self._log(f"{loaded.path}: what compression had not sent yet is dropped: {reason}")

    def _log(self, message: str) -> None:
        self._notes += (message,)
        if self._comm.rank == 0:
            logger.warning(message)

    # -- plain weights -----------------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write whole weights to one file that plain PyTorch can load.

        Values have the dtype that the module computes with (so they are 16-bit where training is). Rank 0 writes
        while units are gathered one by one; no rank ever holds more than one whole unit. All names of tied parameters
        are in it. `export` writes master weights, and tied parameters as Hugging Face does.

        Args:
            save_dir: directory; created if needed.
            save_filename: ends in `.safetensors`, or in `.bin`, `.pt` or `.pth` for a state dict of tensors as
                `torch.save` writes it (`torch.load(weights_only=True)` reads it).
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            max_shard_size: write several files of at most this many bytes, or "5GB", with an index. None: one file.

        Returns:
            True.

        Raises:
            CheckpointPathError: the directory or the name cannot be used.
            CheckpointError: `max_shard_size` is not a size, or writing failed; raised on all ranks.

        Example:
            >>> engine.save_16bit_model("out")  # doctest: +SKIP
            True
            >>> model.load_state_dict(safetensors.torch.load_file("out/model.safetensors"))  # doctest: +SKIP
        """
        self.sharded.check_open("engine.save_16bit_model()")
        parent = directory.check_directory(save_dir, "save_dir")
        weights.write_weights(
            self.sharded,
            parent,
            weights.check_file_name(save_filename),
            exclude_frozen=exclude_frozen_parameters,
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        )
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's whole state dict, on the CPU, with real values on every rank.

        Args:
            destination: dictionary to add to; a new one if None.
            prefix: put before every name.
            keep_vars: only False: values are copies.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Raises:
            UsageError: `keep_vars` is set.
        """
        self.sharded.check_open("engine.module_state_dict()")
        if keep_vars:
            raise UsageError("module_state_dict(keep_vars=True): values are gathered copies; use keep_vars=False")
        found = weights.state_dict(self.sharded, exclude_frozen=exclude_frozen_parameters)
        destination = {} if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Take over a whole state dict of the module; the same values on every rank. Optimizer state stays.

        Args:
            checkpoint: state dict, or a dictionary that has it under the key "module".
            strict: names must be the same in module and state dict.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters whole instead.
            fetch_z3_params: accepted for existing scripts; parameters are always reached.
            allowed_missing_keys: names that the state dict may lack although `strict` is set; they keep their values.

        Raises:
            CheckpointError: names or shapes do not fit; nothing is changed then.
        """
        self.sharded.check_open("engine.load_module_state_dict()")
        self.sharded.hooks.settle()
        inner = checkpoint.get("module")
        values = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is not None:
            self._load_custom(custom_load_fn, values)
        else:
            weights.load_state_dict(self.sharded, values, strict=strict, may_lack=frozenset(allowed_missing_keys or ()))

    def _load_custom(self, function: CustomLoad, values: Mapping[str, Any]) -> None:
        parameters = self.sharded.registry.parameters
        gathered = self.sharded.gather(parameters)
        try:
            with phase(self._comm, "custom_load_fn"), torch.no_grad():
                function(src=values, dst=self.module)
        except BaseException:
            self.sharded.put_back(parameters, gathered, None)
            raise
        first = torch.distributed.get_process_group_ranks(self._comm.user_group)[0] if self._comm.world > 1 else 0
        self.sharded.put_back(parameters, gathered, first)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0 and None elsewhere (called by trainers)."""
        self.sharded.check_open("engine._consolidated_16bit_state_dict()")
        first = self._comm.rank == 0
        found = weights.state_dict(self.sharded, exclude_frozen=exclude_frozen_parameters, keep=first)
        return found if first else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict


def _one_directory(given: Sequence[str], rank: int) -> str:
    """The directory to save to, the same on all ranks: rank 0's; a warning there if others were given others.

    Scripts put the time of day into its name, which differs when ranks do not start within the same second.
    """
    other = next((number for number, path in enumerate(given) if path != given[0]), None)
    if other is not None and rank == 0:
        warn_once(
            f"save_checkpoint(save_dir): {given[0]!r} on rank 0, {given[other]!r} on rank {other}. A checkpoint is one "
            "directory that all ranks share: it is saved to rank 0's. Let rank 0 choose the name and tell the others "
            "(torch.distributed.broadcast_object_list)"
        )
    return given[0]
