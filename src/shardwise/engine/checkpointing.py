"""Checkpoints of an engine: collects and restores the state of its parts; `shardwise.checkpoint` has the files."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import directory, rng
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import TrainingState
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.checkpoint.load import Loaded, find, read, set_group
from shardwise.checkpoint.manifest import Manifest, name_of
from shardwise.checkpoint.match import LoadReport, Options
from shardwise.checkpoint.places import PLACE
from shardwise.checkpoint.save import SaveRequest, save
from shardwise.checkpoint.selection import Patterns, Rename, Selection
from shardwise.engine.background import BackgroundSaves, check_same_way, size_of, statistics
from shardwise.engine.facts import check_loaded
from shardwise.engine.interchange import CustomLoad, check_schedule, load_custom, opener, schedule_name
from shardwise.engine.scaling import on_non_finite
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from shardwise.schedules.base import StepSchedule
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.checkpoint.reader import Checkpoint
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.batch import Batches
    from shardwise.engine.compressing import Compressing
    from shardwise.engine.parallel import SharedTensors
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
_WINDOW = "gradient_accumulation_steps"
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Settings of parameter groups that belong to the schedule."""


class Checkpoints:
    """Saves and loads an engine's training state. Methods are collective unless noted."""

    def __init__(
        self,
        sharded: ShardedModel,
        resolution: Resolution,
        job: Communicator,
        step: TrainStep,
        batches: Batches,
        compressing: Compressing,
        tensors: SharedTensors | None,
    ) -> None:
        self.background = BackgroundSaves(sharded, resolution.config, job)
        self.last_load: LoadReport | None = None
        self.numbers = StateNumbers()
        self._sharded = sharded
        self._resolution = resolution
        self._job = job
        self._step = step
        self._batches = batches
        self._compressing = compressing
        self._tensors = tensors
        self._notes: tuple[str, ...] = ()
        self._last: str | None = None
        self._last_in_background = False

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
        """Save the complete training state to `<save_dir>/<tag>/`.

        Contents: master weights, optimizer state, buffers, schedule, loss scaler, counters, dataloader position, and
        each rank's random number generators. The directory is published atomically, also where it replaces another.

        Infinite or NaN values are logged, and the checkpoint is marked. `resume` prefers the last checkpoint without
        such values, and `checkpoint.keep_last` does not remove that one. With `non_finite` "skip", "stop" or "rewind",
        `latest` keeps naming the previous checkpoint.

        Gradients of an unfinished accumulation window are not saved, which is logged. Training resumed from such a
        checkpoint restarts the window with the micro-batches that follow.

        An asynchronous save waits for the previous one, and returns when the state has been copied; a thread writes
        it (`wait_for_checkpoint`). On CUDA the device continues to copy, and the next `step()` is ordered after
        the copies. Until then only this library may change master weights and optimizer state
        (`safe_set_full_fp32_param` and similar); parameters may be changed.

        Args:
            save_dir: directory of the run's checkpoints, on a file system that all ranks share. Rank 0's value is used.
            tag: name of this checkpoint; `global_step<N>` if None.
            client_state: the script's state; rank 0's is saved. Nested collections of numbers, strings, tensors,
                arrays, dates, paths, enumerations, dataclasses, and classes given to
                `shardwise.checkpoint.register_type`.
            save_latest: let the file `latest` name this checkpoint.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            asynchronous: write in the background; None: `checkpoint.async_save`. The same on every rank.

        Returns:
            True.

        Raises:
            CheckpointPathError: `save_dir` or `tag` cannot be used (a ValueError).
            UsageError: ranks differ in `asynchronous`, or the engine does not span all processes.
            CheckpointError: on all ranks: `client_state` cannot be saved, or writing failed. Earlier checkpoints are
                unchanged, unless the message says that this one is complete and only `latest` could not be written.
                Also for a failed previous asynchronous save, which the message names; this save can be repeated.

        Example:
            >>> import shardwise, tempfile
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory, client_state={"epoch": 3})
            True
            >>> path, client_state = engine.load_checkpoint(directory)
            >>> path.removeprefix(directory), client_state
            ('/global_step0', {'epoch': 3})
            >>> engine.destroy()
        """
        self._sharded.check_there("engine.save_checkpoint()")
        config = self._resolution.config
        begun_at = time.monotonic()
        waited = self.background.settle_last()
        self._sharded.hooks.settle()
        self._step.read_pending()
        background = config.checkpoint.in_background if asynchronous is None else bool(asynchronous)
        with collective_step(self._job, "save_checkpoint") as begun:
            # Absolute, because a script may change its working directory while a thread writes.
            parent = os.path.abspath(directory.check_directory(save_dir, "save_dir"))
            request = SaveRequest(
                directory=parent,
                tag=directory.check_tag(f"global_step{self._step.global_steps}" if tag is None else tag),
                latest=save_latest,
                excluded=self._excluded(exclude_frozen_parameters),
                layout=self.layout(),
                config=self._batches.effective(self._resolution),
                tag_validation=config.checkpoint.tag_validation,
                direct=config.checkpoint.writes_directly(background=background),
                keep_last=config.checkpoint.keep_last,
                keep_every=config.checkpoint.keep_every,
                check_finite=config.non_finite != "ignore",
                latest_if_not_finite=on_non_finite(config) in ("warn", "ignore"),
                numbers=self.numbers,
            )
            self.check_can_save()
            self._tell_of_window()
            state = self.training_state({} if client_state is None else client_state)
            request = replace(request, layout={**self.numbers.layout(state.counters), **request.layout})
            same = {"asynchronous": background, "exclude_frozen_parameters": bool(exclude_frozen_parameters)}
            begun.local = [parent, same]
        request = replace(request, directory=_one_directory([said[0] for said in begun.gathered], self._job.rank))
        check_same_way([said[1] for said in begun.gathered])
        self._last_in_background = background
        if background:
            self.background.start(request, state, begun_at, waited)
            return True
        self._last = path = save(self._sharded.state, request, state)
        if self._job.rank == 0 and self.background.shows_statistics:
            logger.info("%s", statistics(path, size_of(path), time.monotonic() - begun_at - waited))
        return True

    def wait_for_checkpoint(self) -> str | None:
        """Wait until the pending asynchronous save is published; return its path, or None without one (all ranks call).

        Raises:
            CheckpointError: on all ranks: writing failed, or made no progress for most of a collective's timeout (a
                stopped process, a disk that hangs). Earlier checkpoints are unchanged, unless the message says that
                this one is complete. Each failure is raised once: here, by the next `save_checkpoint`, or by `destroy`.
            UsageError: the engine has been destroyed.

        Example:
            >>> import shardwise, tempfile
            >>> config = {"train_batch_size": 2, "checkpoint": {"async_save": True}}
            >>> config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> directory = tempfile.mkdtemp()
            >>> engine.save_checkpoint(directory)
            True
            >>> engine.wait_for_checkpoint().removeprefix(directory)
            '/global_step0'
            >>> engine.checkpoint_pending, engine.wait_for_checkpoint()
            (False, None)
            >>> engine.destroy()
        """
        return self.background.wait()

    def known(self) -> str | None:
        """Return the newest complete checkpoint that this process has saved or loaded, or None. Not a collective."""
        report = self.background.report if self._last_in_background else None
        return self._last if report is None or report.written is None or report.error else report.path

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
        """Load a checkpoint that was saved with any ZeRO stage and any number of ranks; see `save_checkpoint`.

        With the same layout, training continues bit-identically. Checksums are verified before any state changes.
        `engine.last_load` (`shardwise.checkpoint.LoadReport`) lists loaded and differing entries; differences are
        logged. DeepSpeed checkpoints load as well; state without a counterpart here is logged.

        Args:
            load_dir: directory of the run's checkpoints.
            tag: name of the checkpoint. None: the one that `latest` names; if it is incomplete, damaged or not finite,
                the newest other one. Skipped checkpoints are logged with the reason.
            load_module_strict: require equal names in model and checkpoint, and a match for each pattern and rule.
                False: load the names that both have. Shapes must match in any case.
            load_optimizer_states: also load optimizer state, settings of parameter groups, and the loss scale.
            load_lr_scheduler_states: also load the schedule. False: groups keep this engine's rates, unless the
                script loads the schedule before the next update.
            load_module_only: load parameters and buffers only.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters gathered, instead
                of loading parameters by name.
            include: load only parameters and buffers (names in the model) that match one of these patterns: `*` is any
                text, `?` one character, `[ab]` one of a set. Others keep their values.
            exclude: skip names that match one of these patterns.
            rename: maps names of the checkpoint to names of the model: a dictionary; a list of (regular expression,
                replacement), applied one after another; or a function of the name.
            load_param_groups: with optimizer state, also load the settings of parameter groups (lr, weight_decay, ...),
                which requires unchanged groups. False: keep this engine's; parameters may be in any groups.

        Returns:
            (path of the checkpoint, client_state), or (None, None) if `tag` is None and no checkpoint exists.

        Raises:
            CheckpointPathError: `load_dir` or `tag` cannot be used.
            CheckpointError: the checkpoint is missing, incomplete, damaged, or of another format or model. Its
                attribute `report` lists all names and shapes that differ.
            UsageError: an argument is invalid, or differs between ranks.
        """
        self._sharded.check_there("engine.load_checkpoint()")
        self.background.await_last()  # a failure is raised by the next save or wait
        self._sharded.hooks.settle()
        with collective_step(self._job, "load_checkpoint") as agreed:
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
            if checked is None and self._resolution.config.checkpoint.load_universal and self._job.rank == 0:
                options = replace(options, order=(_latest_universal(parent),))
            agreed.local = self.numbers.after(parent) - 1 if self._job.rank == 0 else 0
        self.numbers.see(agreed.gathered[0])  # later saves are numbered after all existing ones
        return self.restore(parent, checked, options, load_lr_scheduler_states, custom_load_fn)

    @torch.inference_mode(False)  # because the next step changes the loaded state
    def restore(
        self,
        parent: str,
        tag: str | None,
        options: Options,
        load_lr_scheduler_states: bool = True,
        custom_load_fn: CustomLoad | None = None,
        going_back: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, from checked arguments. With `going_back` (a rewind within a run) the dataloader position
        and the record of known checkpoints stay.
        """

        def check(saved: Checkpoint) -> None:
            with_scheduler = load_lr_scheduler_states and not options.module_only
            if not options.module_only:
                self._check_training_state(saved.manifest, saved.path, with_scheduler=with_scheduler)
            if options.with_optimizer:
                self._check_replicas(saved.manifest, saved.path, custom=options.custom)
            if with_scheduler and self._step.lr_scheduler is not None:
                check_schedule(saved, self._step.lr_scheduler)

        found = find(self._sharded.state, parent, tag, options, opener(self._sharded), check)
        if found is None:
            return None, None
        saved, matched = found
        self._notes = ()
        groups = [] if self._sharded.optimizer is None else self._sharded.optimizer.param_groups
        rates = copy.deepcopy([{name: group[name] for name in _RATES if name in group} for group in groups])
        with saved:
            loaded = read(self._sharded.state, saved, matched, options)
            if custom_load_fn is not None:
                load_custom(self._sharded, self._job, custom_load_fn, saved.module_values())
        self._step.read_pending()
        self._step.begin_again()
        self.numbers.loaded()
        self.numbers.see(loaded.manifest.sequence)
        if self._sharded.compressor is not None:
            self._sharded.compressor.clear()  # its residuals belong to gradients at other weights
        if not loaded.manifest.finite:
            self._log(f"{loaded.path}: it was saved with values that are infinite or NaN, which are loaded")
        if not options.module_only:
            if saved.notes:
                self._log(f"{loaded.path}: not taken over: {'; '.join(saved.notes)}")
            with_groups = options.with_optimizer and options.settings
            with collective_step(self._job, f"loading checkpoint {loaded.path}"):
                self._take_schedule(loaded, with_groups, load_lr_scheduler_states, rates)
                self._take_training_state(loaded, options, going_back)
            self._check_scalars(loaded.path)
        self._compressing.loaded(matched.report.loaded, loaded.manifest.counters, taken=not options.module_only)
        if self._job.rank == 0 and (matched.report.differs or matched.report.notes):
            logger.warning("%s", matched.report)
        if not going_back:
            self._last, self._last_in_background = loaded.path, False
            self.last_load = replace(matched.report, notes=matched.report.notes + self._notes)
        return loaded.path, loaded.client

    def _check_scalars(self, path: str) -> None:
        """Raise a DesyncError if scalars that decide the next step differ between data-parallel ranks."""
        scheduler, scaler = self._step.lr_scheduler, self._step.loss_scaler
        trees = {
            "counter": {name: getattr(self._step, name) for name in _COUNTERS},
            "schedule": None if scheduler is None else scheduler.state_dict(),
            "loss scale": None if scaler is None else scaler.state_dict(),
        }
        check_loaded(self._batches.data, path, self._sharded.optimizer, trees)

    def _check_training_state(self, manifest: Manifest, path: str, *, with_scheduler: bool) -> None:
        if with_scheduler and self._step.lr_scheduler is not None and manifest.scheduler is None:
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

    def _check_replicas(self, manifest: Manifest, path: str, *, custom: bool) -> None:
        """Raise CheckpointError if replicas differed when they saved, and are others now."""
        saved, local = manifest.layout.get("local_sgd"), self._sharded.local
        if saved is None or saved["agreed"]:
            return
        if local is not None and local.layout()["layout"] == saved["layout"] and not custom:
            return
        raise CheckpointError(
            f"{path}: was saved by {saved['replicas']} replicas between two exchanges (local_sgd), each with its own "
            "parameters and optimizer state, which only as many replicas of the same layout can continue. Load it "
            "there, call engine.synchronize_replicas() and save again; or pass load_optimizer_states=False for the "
            "parameters of the last exchange"
        )

    def check_can_save(self) -> None:
        """Raise a UsageError if the engine does not span all processes of the job."""
        everyone = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if self._job.world != everyone:
            raise UsageError(
                f"save_checkpoint(): this engine spans {self._job.world} of {everyone} processes (mpu), and several "
                "engines cannot share a checkpoint in this version"
            )

    def _tell_of_window(self) -> None:
        if self._sharded.state.holds_gradients and self._job.rank == 0:
            warn_once(
                "save_checkpoint(): in the middle of an accumulation window. Checkpoints hold no gradients: those of "
                "the window so far are not in it, and going on from it begins the window anew, with the micro-batches "
                "that follow. Save after the engine.step() that ends a window (every "
                f"{self._batches.steps} micro-batches) to lose none"
            )

    def _excluded(self, frozen: bool) -> frozenset[int]:
        registry = self._sharded.registry
        pairs = zip(registry, registry.parameters, strict=True)
        return frozenset(tensor.index for tensor, parameter in pairs if frozen and not parameter.requires_grad)

    def layout(self) -> dict[str, Any]:
        """Return the manifest's entries for the engine."""
        compute = self._sharded.policy.compute_dtype or torch.float32
        schedule = schedule_name(self._step.lr_scheduler)
        named = {} if schedule is None else {"scheduler": schedule}
        local = {} if self._sharded.local is None else {"local_sgd": self._sharded.local.layout()}
        return {"stage": self._sharded.plan.stage, "dtype": name_of(compute), **named, **local}

    def training_state(self, client: Mapping[str, Any]) -> TrainingState:
        """Return the state to be saved besides parameters and optimizer; `client` is the script's state."""
        if not isinstance(client, Mapping):
            raise CheckpointError(f"client_state: expected a dictionary, found an object of {type(client)}")
        scheduler = self._step.lr_scheduler
        if scheduler is not None and not hasattr(scheduler, "state_dict"):
            raise CheckpointError(
                f"save_checkpoint(): the learning-rate scheduler {type(scheduler).__name__} has no state_dict(), so "
                "it could not go on where it was; give it state_dict() and load_state_dict()"
            )
        loader = self._batches.training_dataloader
        return TrainingState(
            client=dict(client),
            rank={
                PLACE: {name: list(pair) for name, pair in self._sharded.sharding.place.items()},
                "rng": rng.capture(self._sharded.device),
                "compression": self._kept(),
                "optimizer": self._sharded.state.rank_state(),
                **({} if self._step.watch is None else {"watch": self._step.watch.state()}),
            },
            scheduler=None if scheduler is None else scheduler.state_dict(),
            scaler=None if self._step.loss_scaler is None else self._step.loss_scaler.state_dict(),
            loader=None if loader is None else loader.state_dict(),
            counters={
                **{name: getattr(self._step, name) for name in _COUNTERS},
                # Training resumed in the middle of a window restarts the window.
                "micro_steps": self._step.window_began
                if self._sharded.state.holds_gradients
                else self._step.micro_steps,
                _WINDOW: self._batches.steps,
                **self._compressing.counters(),
            },
        )

    def _take_rank_state(self, loaded: Loaded) -> None:
        own = None if loaded.rank is None else loaded.rank.get("optimizer")
        if own is None and (loaded.same or loaded.line.get("optimizer") is None):
            return
        if not loaded.same or not self._sharded.state.load_rank_state(own):
            self._log(
                f"{loaded.path}: what each rank has not sent yet (the errors of compressed communication, and steps of "
                f"its own since the last average) is dropped, because it belongs to {len(loaded.manifest.ranks)} ranks "
                "and the layout it was saved with; training goes on from what all ranks agree on, with the optimizer "
                "state of the first replica where replicas had their own (local_sgd)"
            )

    def _take_schedule(
        self, loaded: Loaded, with_groups: bool, with_scheduler: bool, rates: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load the schedule. The groups' rates become those of the schedule in force, if only one of the two has been
        loaded; `rates` are those before the load.
        """
        scheduler, optimizer = self._step.lr_scheduler, self._sharded.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        by_step = isinstance(scheduler, StepSchedule)
        if scheduler is None:
            if with_scheduler and loaded.scheduler is not None:
                self._log(f"{loaded.path}: holds the state of a learning-rate scheduler, and this engine has none")
        elif with_scheduler:
            of_deepspeed = loaded.manifest.layout.get("library") == "deepspeed" and by_step
            (scheduler.load_finished if of_deepspeed else scheduler.load_state_dict)(loaded.scheduler)
            if not by_step and not with_groups:
                self._step.follow_schedule()
        elif with_groups:
            for group, before in zip(groups, rates, strict=True):
                set_group(group, dict(before))
            if by_step:
                scheduler.load_state_dict(scheduler.state_dict())  # momentum, too
        self._step.rates_before = None if with_scheduler else self._step.last_rates()

    def _take_training_state(self, loaded: Loaded, options: Options, going_back: bool) -> None:
        path, world = loaded.path, self._job.world
        if options.optimizer and self._step.loss_scaler is not None and loaded.scaler is not None:
            self._step.loss_scaler.load_state_dict(loaded.scaler)
        if options.optimizer:
            self._take_rank_state(loaded)
        counters = loaded.manifest.counters
        for name in _COUNTERS:
            setattr(self._step, name, counters[name])
        if counters[_WINDOW] != self._batches.steps:
            # The window length has changed: start a new window.
            self._step.micro_steps = self._step.global_steps * self._batches.steps
        self._step.window_began = self._step.micro_steps
        own = loaded.rank if loaded.rank is not None else loaded.line
        self._take_kept(own.get("compression") if options.optimizer else None, loaded)
        if self._step.watch is not None:
            self._step.watch.load(own.get("watch"), self._sharded.device)
        if not going_back and self._batches.training_dataloader is not None and loaded.loader is not None:
            self._batches.training_dataloader.load_state_dict(loaded.loader)
        if not loaded.same and own["rng"] is not None:
            self._log(
                f"{path}: saved on {len(loaded.manifest.ranks)} ranks and loaded on {world}, in another layout; random "
                "numbers continue on the ranks whose samples both layouts have"
            )
        self._compare_batches(loaded)
        if not loaded.same and self._tensors is not None:
            self._tensors.compare_again()
        if loaded.rng is not None:
            # Last, because no later code draws random numbers.
            rng.restore(loaded.rng, self._sharded.device, with_torch=loaded.with_torch)

    def _compare_batches(self, loaded: Loaded) -> None:
        micro = loaded.manifest.config.get("train_micro_batch_size_per_gpu")
        if self._resolution.config.sample_seed is not None and micro not in (None, self._batches.micro):
            raise CheckpointError(
                f"{loaded.path}: saved with micro-batches of {micro} samples, and now they have {self._batches.micro}; "
                "with `sample_seed` random numbers follow micro-batches of equal size. Set "
                f"train_micro_batch_size_per_gpu to {micro}, or remove sample_seed"
            )
        before, now = loaded.manifest.config.get("train_batch_size"), self._batches.total
        if self._sharded.update is not None and before is not None and before != now:
            self._log(
                f"{loaded.path}: saved with {before} samples in a step (train_batch_size), and now there are {now}; "
                "learning rate and schedule are left as they are. To keep the batch when the number of ranks changes, "
                "give train_batch_size and train_micro_batch_size_per_gpu and leave gradient_accumulation_steps out"
            )

    @property
    def _method(self) -> str:
        return self._resolution.config.compression.type or "zero_quantized_gradients"

    def _kept(self) -> dict[str, Any] | None:
        compressor = self._sharded.compressor
        if compressor is None:
            return None
        return {"method": self._method, "layout": self._sharded.reduced_layout(), "kept": compressor.state_dict()}

    def _take_kept(self, saved: dict[str, Any] | None, loaded: Loaded) -> None:
        """Load the residuals if method, ranks and layout are unchanged; the decision is the same on all ranks."""
        compressor = self._sharded.compressor
        if compressor is not None:
            compressor.steps = self._step.global_steps
        if saved is None:
            return
        if compressor is None:
            now = "no compression" if self._job.world > 1 else "one rank, and nothing is sent"
            reason = f'it was kept by "{saved["method"]}", and there is {now}'
        elif saved["method"] != self._method:
            reason = f'it was kept by "{saved["method"]}", and the method is "{self._method}"'
        elif len(loaded.manifest.ranks) != self._job.world:
            reason = f"{len(loaded.manifest.ranks)} ranks have kept it, and there are {self._job.world}"
        elif not loaded.same:
            reason = "it was kept in another layout of the ranks"
        elif saved["layout"] != self._sharded.reduced_layout():
            reason = "parameters are laid out in other units than they were"
        else:
            compressor.load_state_dict(saved["kept"])
            return
        self._log(f"{loaded.path}: what compression had not sent yet is dropped: {reason}")

    def _log(self, message: str) -> None:
        self._notes += (message,)
        if self._job.rank == 0:
            logger.warning(message)


def _latest_universal(parent: str) -> str:
    found = CheckpointDirectory(parent).latest(directory.LATEST_UNIVERSAL)
    if found is None:
        raise CheckpointPathError(
            f"{parent}: checkpoint.load_universal is on, and there is no file {directory.LATEST_UNIVERSAL!r}, which "
            "names a universal checkpoint. Pass its tag, or switch the key off: checkpoints of other formats are "
            "recognised without it"
        )
    return found


def _one_directory(given: Sequence[str], rank: int) -> str:
    """Return rank 0's save directory; ranks differ if scripts put the time of day into the name."""
    other = next((number for number, path in enumerate(given) if path != given[0]), None)
    if other is not None and rank == 0:
        warn_once(
            f"save_checkpoint(save_dir): {given[0]!r} on rank 0, {given[other]!r} on rank {other}. A checkpoint is one "
            "directory that all ranks share: it is saved to rank 0's. Let rank 0 choose the name and tell the others "
            "(torch.distributed.broadcast_object_list)"
        )
    return given[0]
