"""Batch sizes of an engine, and dataloaders of each rank's samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.config import effective
from shardwise.config.batch import MICRO, STEPS, TRAIN
from shardwise.data import CurriculumSampler, EngineDataLoader, TokenBatches
from shardwise.data.indexed import MMapIndexedDataset
from shardwise.data.token_batches import scale_rate
from shardwise.device import Later
from shardwise.errors import BatchSizeError, ConfigError, UsageError
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config, Resolution

ROUTES = ("train", "eval", "predict")
_END = object()
_DYNAMIC = "data_efficiency.data_sampling.dynamic_batching"


def accumulated(config: Config, steps: int) -> int:
    """Return the number of micro-batches for a memory plan; at least two if each backward pass accumulates."""
    return steps if config.managed_gradient_accumulation else max(2, steps)


class Batches:
    """Batch sizes, which may change between windows, and the training dataloader. train_batch_size =
    train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks, always.
    """

    def __init__(self, config: Config, data: Communicator, device: torch.device) -> None:
        assert config.train_micro_batch_size_per_gpu is not None and config.gradient_accumulation_steps is not None
        self.micro, self.steps = int(config.train_micro_batch_size_per_gpu), int(config.gradient_accumulation_steps)
        self.training_dataloader: EngineDataLoader | None = None
        self._config = config
        self.data = data
        self.claimed = 0  # samples of this rank, where micro-batches are unequal
        self._device = device
        sampling = config.data_efficiency
        self._unsampled = sampling.curriculum is not None or sampling.token_batches is not None

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.data.world

    @property
    def total(self) -> int:
        """Samples of all ranks in a step."""
        return self.micro * self.steps * self.data.world

    def effective(self, resolution: Resolution) -> dict[str, Any]:
        """Return the effective configuration with the present batch sizes."""
        return {**effective(resolution), TRAIN: self.total, MICRO: self.micro, STEPS: self.steps}

    def samples(self, passes: float) -> int:
        """Return the samples of all ranks in `passes` micro-batches of each, on average."""
        return round(self.micro * passes * self.data.world)

    def own_weight(self) -> int | None:
        """Return the number of samples of the newest batch, by which its loss counts; None: micro-batches are equal."""
        loader = self.training_dataloader
        if loader is None or loader.parts is None:
            return None
        samples = loader.claim()
        self.claimed += samples
        return samples

    def dynamic(self) -> tuple[int, float] | None:
        """Return the samples of the step and the factor of its learning rate; None without dynamic batching."""
        loader, section = self.training_dataloader, self._config.data_efficiency.token_batches
        if self._unsampled and loader is None and self.data.rank == 0:
            warn_once(
                "data_efficiency.data_sampling: the engine has made no data loader that reads the section. Pass "
                "training_data to initialize(), or call engine.deepspeed_io(dataset) for a curriculum, or "
                "engine.dynamic_batching(dataset, lengths). Ignore this warning if the script has a CurriculumSampler"
            )
        if section is None or loader is None or not isinstance(loader.sampler, TokenBatches):
            return None
        samples = loader.claim_samples(self.steps)
        return samples, scale_rate(samples, self.total, section.lr_scaling_method)

    def token_batches(self, lengths: Any) -> TokenBatches:
        """Return micro-batches by the section `dynamic_batching` of samples with `lengths` tokens each."""
        section = self._config.data_efficiency.token_batches
        if section is None or section.max_tokens is None:
            raise ConfigError(f"{_DYNAMIC}.enabled: batches by tokens were requested, and the section is not enabled")
        self._unsampled = False
        made = TokenBatches(
            lengths,
            section.max_tokens,
            rank=self.data.rank,
            world_size=self.data.world,
            steps=self.steps,
            least=section.min_batch_size,
            most=section.max_batch_size,
            order=section.sequence_picking_order,
            seed=self._config.data_efficiency.seed,
        )
        if section.verbose and self.data.rank == 0:
            logger.info("dynamic batching: %d micro-batches of a rank in an epoch", len(made))
        return made

    def _own_sampler(self, dataset: Any, micro: int) -> Any:
        """Return the sampler of `data_efficiency.data_sampling`, or None."""
        config = self._config.data_efficiency
        if config.curriculum is None and config.token_batches is None:
            return None
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"data_efficiency.data_sampling: {type(dataset).__name__} has no __getitem__ and __len__, which "
                "samplers need; pass a map-style dataset, or remove the section"
            )
        if config.curriculum is not None:
            ranks = (self.data.rank, self.data.world)
            self._unsampled = False
            return CurriculumSampler(config, len(dataset), micro, *ranks, gradient_accumulation_steps=self.steps)
        assert config.token_batches is not None
        path = config.token_batches.metrics_path
        if path is None:
            raise ConfigError(
                f"{_DYNAMIC}.metrics_path: the lengths of the samples are needed; write the path of an analyzed metric "
                "(..._sample_to_metric), or call engine.dynamic_batching(dataset, lengths) without training_data"
            )
        lengths = MMapIndexedDataset(path, integers=True).values
        if len(lengths) != len(dataset):
            raise ConfigError(f"{_DYNAMIC}.metrics_path: {len(lengths)} lengths for {len(dataset)} samples")
        return self.token_batches(lengths)

    def dynamic_batching(
        self, dataset: Any, lengths: Sequence[int], collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> EngineDataLoader:
        """Make the training dataloader one with micro-batches by tokens (section `dynamic_batching`), and return it.

        Each step multiplies the learning rate of the schedule by `lr_scaling_method` of its samples. Micro-batches
        count alike; to count their samples or tokens, pass `engine.backward(loss, weight=...)`.

        Args:
            dataset: a map-style dataset.
            lengths: tokens of each sample.
            collate_fn: makes a batch from a list of samples of different length.

        Raises:
            ConfigError: the section is not enabled, or no step fits.
        """
        if len(lengths) != len(dataset):
            raise ConfigError(f"engine.dynamic_batching(): {len(lengths)} lengths for {len(dataset)} samples")
        sampler = self.token_batches(lengths)
        self.training_dataloader = self.loader(dataset, collate_fn=collate_fn, data_sampler=sampler)
        return self.training_dataloader

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Set a function that makes each batch of the training dataloader of the batch and the sampler's state, whose
        "current_difficulties" has the difficulty of each metric. Raises UsageError without a curriculum by metrics.
        """
        loader = self.training_dataloader
        if loader is None or not isinstance(loader.sampler, CurriculumSampler):
            raise UsageError(
                "set_data_post_process_func(): the engine has no training dataloader with a curriculum; pass "
                "training_data to initialize(), and enable data_efficiency.data_sampling.curriculum_learning"
            )
        loader.post_process = post_process_func

    def ending_together(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a script's loader until that of any data-parallel rank has ended (all ranks iterate).

        Ranks whose loaders differ in length would otherwise wait for each other. Each batch costs one small all-reduce,
        for which the host waits. The engine's own loaders have equally many batches.
        """
        for batch in itertools.chain(loader, [_END]):
            if self.data.world > 1:
                ended = torch.tensor([float(batch is _END)], dtype=torch.float32, device=self._device)
                self.data.all_reduce(ended, "loader_end").wait()
                if Later(ended).read()[0]:
                    return
            if batch is not _END:
                yield batch

    def set_total(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps to reach a global batch size."""
        sampler = None if self.training_dataloader is None else self.training_dataloader.sampler
        if isinstance(sampler, (CurriculumSampler, TokenBatches)):
            raise BatchSizeError(
                "train_batch_size cannot be changed: `data_efficiency.data_sampling` has formed batches of "
                f"{self.steps} micro-batches. Set it in the configuration"
            )
        unit = self.micro * self.data.world
        if not self._config.managed_gradient_accumulation and train_batch_size != unit:
            raise BatchSizeError(
                f"train_batch_size cannot be set to {train_batch_size}: with managed_gradient_accumulation false the "
                "script decides how many micro-batches make a step, by when it calls engine.step()"
            )
        if train_batch_size <= 0 or train_batch_size % unit:
            raise BatchSizeError(
                f"train_batch_size {train_batch_size} is not a positive multiple of {unit} "
                f"(micro-batch {self.micro} x {self.data.world} ranks); "
                f"the nearest is {max(1, round(train_batch_size / unit)) * unit}"
            )
        self.steps = train_batch_size // unit

    def set_micro(self, micro_batch_size: int) -> None:
        """Change the micro-batch size."""
        if micro_batch_size <= 0:
            raise BatchSizeError(f"train_micro_batch_size_per_gpu must be positive, got {micro_batch_size}")
        self.micro = micro_batch_size

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        unequal: Sequence[int] | None = None,
    ) -> EngineDataLoader:
        """Return a dataloader of this rank's samples, as `initialize(training_data=...)` makes one.

        Checkpoints save only the position of `engine.training_dataloader`.

        Args:
            dataset: a map-style or iterable dataset.
            batch_size: samples in a batch of this rank; None: `engine.train_micro_batch_size_per_gpu()`.
            route: "train" shuffles a map-style dataset without a sampler; "eval" and "predict" keep its order.
            pin_memory: pin batches for a CUDA device; no effect for a CPU.
            data_sampler: yields this rank's indices.
            collate_fn: makes a batch from a list of samples.
            num_local_io_workers: prefetching processes; None: none.
            unequal: samples of each rank in a micro-batch.

        Raises:
            UsageError: an unknown route.
            ConfigError: the settings contradict each other or the dataset, or yield no batch.
        """
        if route not in ROUTES:
            raise UsageError(f"deepspeed_io(route={route!r}): expected one of {', '.join(ROUTES)}")
        micro = self.micro if batch_size is None else batch_size
        sampling = self._config.data_efficiency
        if route == "train" and data_sampler is None:
            data_sampler = self._own_sampler(dataset, micro)
            if num_local_io_workers is None and sampling.enabled and sampling.data_sampling.enabled:
                num_local_io_workers = sampling.data_sampling.num_workers
        return EngineDataLoader(
            dataset,
            batch_size=micro,
            rank=self.data.rank,
            world_size=self.data.world,
            collate_fn=collate_fn,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self._config.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            blocks=route == "train" and self._config.sample_seed is not None,
            unequal=unequal,
            device=self._device if pin_memory else None,
        )
