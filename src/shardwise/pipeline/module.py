"""The pipeline module: a model of which each rank builds the layers of its stages."""

from __future__ import annotations

import copy
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.topology import ProcessTopology
from shardwise.compat import dtype_of_to
from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.layers import (
    Alias,
    Layers,
    LayerSpec,
    OwnStages,
    PipelineStage,
    Recompute,
    SpecLayers,
    TiedLayerSpec,
    TiedParameter,
)
from shardwise.pipeline.partition import LayerCost, partition

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "measure"]


class PipelineModule(nn.Module):
    """A model as a sequence of layers, of which each rank builds those of its pipeline stages.

    Each layer is called with the result of the layer before: a tensor, or a tuple of tensors as one argument.
    Parameters have the names of the whole model (`layers.3.weight`) on any number of stages.

    Weights do not depend on the number of stages, because each layer is built under a seed of its own. With
    `seed_layers`, the seed of layer i is `base_seed` + i. Else one draw from torch's CPU generator gives all seeds; all
    ranks must make this draw from the same state. Building layers does not change torch's generators.

    One process has all stages from the start; the module is then an ordinary model. On several ranks the stages are
    built by `build`, which the engine calls, or when parameters are needed before: all ranks of the process group are
    then taken for ranks of the pipeline, with one of `num_stages` stages each.

    Args:
        layers: `LayerSpec`s, modules and functions in order, an nn.Sequential, or `to_layers` of a Hugging Face model.
        num_stages: requested number of stages; None: that of `topology`, else the engine decides.
        topology: ranks of the job; its axis `pipe` sets the number of stages.
        loss_fn: called with the output of the last layer and the labels; None: the loss of the layers, if any.
        seed_layers: seed layer i with `base_seed` + i.
        seed_fn: called with the seed of a layer in place of seeding torch; only with `seed_layers`.
        base_seed: seed of the first layer.
        partition_method: see `partition`.
        activation_checkpoint_interval: number of adjacent layers that are recomputed together; 0: none.
        activation_checkpoint_func: activation checkpointing function; None: that of torch, non-reentrant.
        checkpointable_layers: class names of the layers that may be recomputed; None: layers with parameters.
        dynamic_shape: shapes of activations depend on more than the shapes of the inputs.
        sample_batch: input of the first layer for `profile`; partition_method `best` then uses measured times.

    Raises:
        UsageError: a layer is neither a specification nor a module nor a function.
        ConfigError: `num_stages` contradicts `topology`, or the layers cannot be divided.
    """

    loss_fn: Callable[..., Any] | None

    def __init__(
        self,
        layers: Sequence[Any] | Layers,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "best",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Collection[str] | None = None,
        dynamic_shape: bool = False,
        sample_batch: Any = None,
    ) -> None:
        super().__init__()
        self.num_stages = _requested(num_stages, topology)
        self.partition_method, self.sample_batch, self.dynamic_shape = partition_method, sample_batch, dynamic_shape
        self.recompute = Recompute(activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers)
        if not isinstance(layers, Layers):
            count = len(layers)
            drawn = torch.randint(2**62, (count,), device="cpu").tolist()
            seeds = [base_seed + i for i in range(count)] if seed_layers else drawn
            layers = SpecLayers(layers, seeds, seed_fn if seed_layers else None)
        self._layers, self._topology = layers, topology
        chosen = loss_fn if loss_fn is not None else layers.loss_fn
        if isinstance(chosen, nn.Module) and any(True for _ in chosen.parameters()):
            raise UsageError("PipelineModule: loss_fn has parameters. Make the parameters part of the last layer")
        # No submodule, because the names of a model are those of its layers.
        object.__setattr__(self, "loss_fn", chosen)
        self.costs: list[LayerCost] | None = None
        self.boundaries: list[int] | None = None
        self._stages: dict[int, PipelineStage] = {}
        self.assumed = False  # the stages are those that `initialize` would build, as far as the ranks tell
        if _ranks() == 1:
            self.build(range(self.num_stages or 1), self.num_stages or 1)

    @classmethod
    def from_stages(
        cls,
        modules: nn.Module | Sequence[nn.Module],
        num_stages: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        tied_weights: Sequence[Sequence[str]] = (),
        **options: Any,
    ) -> PipelineModule:
        """Return a pipeline of a model that the client has divided: each rank passes the modules of its own stages.

        A stage is called with the result of the stage before, as one argument. Parameters of stage i have the names
        `stages.i.NAME`. Data-parallel ranks pass modules with equal weights.

        Args:
            modules: the module of this rank's stage; several, in order, for a schedule with several stages on a rank.
            num_stages: number of pipeline ranks. Consecutive ranks have the same stage, the first ranks stage 0.
            loss_fn: as of the constructor; only the last stage needs it.
            tied_weights: for each parameter that stages share, its names: [["stages.0.words.weight",
                "stages.3.head.weight"]], the same on all ranks. The stage of the first name gives the values, and
                checkpoints have that name.
            options: `activation_checkpoint_interval`, `activation_checkpoint_func` or `dynamic_shape`.
        """
        own = OwnStages([modules] if isinstance(modules, nn.Module) else modules, tied_weights)
        return cls(own, num_stages, loss_fn=loss_fn, **options)

    def topology(self) -> ProcessTopology | None:
        """Return the requested topology."""
        return self._topology

    @property
    def pretrained_model(self) -> Any:
        """The Hugging Face model of which this module has the layers, without its weights; None: there is none."""
        return getattr(self._layers, "template", None)

    def description(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks."""
        costs = [] if isinstance(self._layers, OwnStages) else self._layers.costs()
        layers = {f"layer {i}": f"{of.name} of {of.parameters} parameters" for i, of in enumerate(costs)}
        return layers | {"partition_method": str(self.partition_method), "ties": str(self._layers.ties())}

    def profile(self, sample: Any = None, device: torch.device | str | None = None) -> list[LayerCost]:
        """Measure time and memory of each layer on a sample input of the first layer, one layer after the other.

        All ranks must partition by the same costs: measure on one rank, and broadcast the result.
        """
        sample = self.sample_batch if sample is None else sample
        if sample is None:
            raise UsageError("PipelineModule.profile: expected a sample batch. Pass sample_batch to the PipelineModule")
        return measure(self._layers, sample, device)

    def partition(self, stages: int, costs: Sequence[LayerCost] | None = None) -> list[int]:
        """Return the boundaries of pipeline stages; `costs` are those of `profile`, equal on all ranks."""
        method = self.partition_method
        if isinstance(self._layers, OwnStages):
            return list(range(stages + 1))
        if costs is None and self.measures:
            if _ranks() > 1:
                raise UsageError(
                    "PipelineModule: layer times are measured on one rank, and must be equal on all ranks. Pass "
                    "partition(stages, costs) or build(..., costs=costs) with the result of profile() of one rank"
                )
            costs = self.costs = self.costs or self.profile()
        return partition(method, stages, self._layers.costs() if costs is None else costs)

    def build(
        self,
        stages: Iterable[int],
        count: int | None = None,
        device: torch.device | str | None = None,
        costs: Sequence[LayerCost] | None = None,
    ) -> None:
        """Build the stages of this rank, and drop the layers of other stages.

        Layers that this rank has built before keep their values.

        Args:
            stages: numbers of the stages of this rank.
            count: number of stages of the model; None: the requested number, else 1.
            device: moves the stages; layers on the meta device are then initialized, each under a seed of its own.
            costs: measured costs of the layers, equal on all ranks.
        """
        count = count or self.num_stages or 1
        boundaries = self.partition(count, costs)
        parts = list(pairwise(boundaries))
        numbers = sorted(set(stages))
        if not numbers or not 0 <= numbers[0] <= numbers[-1] < count:
            raise UsageError(f"PipelineModule.build: expected stages of 0 to {count - 1}, found {numbers}")
        if self.assumed and (numbers != [*self._stages] or boundaries != self.boundaries):
            raise UsageError(
                f"PipelineModule: parameters or modules were used before initialize, in stages {[*self._stages]} of "
                f"{self.num_stages}, and this rank gets stages {numbers} of {count}: changes would be lost. Use them "
                f"after initialize, or call build({numbers}, {count}) first"
            )
        self.boundaries, self.assumed = boundaries, False
        self._stages = {number: self._layers.build(number, *parts[number], self.recompute) for number in numbers}
        self._layers.keep([layer for number in numbers for layer in range(*parts[number])])
        self._modules.clear()
        for stage in self._stages.values():
            if device is not None:
                self._layers.materialize(stage, device)
            stage.train(self.training)
            _merge(self, stage)

    def stage(self, number: int) -> PipelineStage:
        """Return a stage of this rank."""
        if number not in self._stages:
            raise UsageError(f"Stage {number} is not on this rank. Its stages are {sorted(self._stages)}")
        return self._stages[number]

    @property
    def built_stages(self) -> tuple[PipelineStage, ...]:
        """The stages of this rank in order."""
        return tuple(self._stages.values())

    def layers_of(self, stage: int) -> str:
        """Return the layers of a stage in words."""
        assert self.boundaries is not None
        first, last = self.boundaries[stage], self.boundaries[stage + 1] - 1
        return f"layer {first}" if first == last else f"layers {first} to {last}"

    @property
    def measures(self) -> bool:
        """Whether the layers are divided by times that have to be measured."""
        method = self.partition_method
        return method == "profile" or (method == "best" and self.sample_batch is not None)

    def stage_owner(self, layer: int) -> int:
        """Return the number of the stage that has a layer."""
        if self.boundaries is None or not 0 <= layer < self.boundaries[-1]:
            raise UsageError(f"stage_owner: expected a layer of a model that has been divided, found layer {layer}")
        return bisect_right(self.boundaries, layer) - 1

    def tied_parameters(self) -> list[TiedParameter]:
        """Return the parameters that several stages share, with the numbers of these stages as `users`."""
        found = [replace(t, users=tuple(sorted({*map(self.stage_owner, t.users)}))) for t in self._layers.ties()]
        return [tie for tie in found if len(tie.users) > 1]

    def shared_modules(self) -> dict[str, tuple[int, ...]]:
        """Return the names of modules that several layers are, with the stages of these layers."""
        return {name: tuple(map(self.stage_owner, of)) for name, of in self._layers.shared_modules().items()}

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the number of adjacent layers that are recomputed together; 0: none."""
        self.recompute.interval = interval

    def forward(self, *args: Any, stage: int | None = None, **kwargs: Any) -> Any:
        """Return the output of a stage; None: of the last layer, for which this process must have all stages."""
        if stage is not None:
            return self.stage(stage)(*args, **kwargs)
        if self.boundaries is None or len(self._stages) < len(self.boundaries) - 1:
            raise UsageError(
                f"PipelineModule: this rank has the stages {sorted(self._stages)} only. Call engine.train_batch() or "
                "engine.eval_batch(), which run all stages"
            )
        first, *rest = self._stages.values()
        value = first(*args, **kwargs)
        for following in rest:
            value = following(value)
        return value

    def train(self, mode: bool = True) -> PipelineModule:
        """Set training mode of all stages, also of those that are built later."""
        if self.boundaries is None:
            self.training = mode
            return self
        super().train(mode)
        for stage in self.built_stages:
            stage.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> PipelineModule:
        """Move or convert the stages of this rank. Before `initialize`, which moves them, only a dtype counts."""
        only_moves = self.boundaries is None and dtype_of_to(*args, **kwargs) is None
        return self if only_moves else super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> PipelineModule:
        """Move the stages of this rank, as `to`."""
        return self if self.boundaries is None else super().cuda(device)

    def cpu(self) -> PipelineModule:
        """Move the stages of this rank, as `to`."""
        return self if self.boundaries is None else super().cpu()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return names and modules of the stages of this rank, whose parameters and buffers are the model's."""
        self._require_stages("modules")
        return super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return names and modules of which the stages of this rank consist, also for `apply` and `to`."""
        self._require_stages("modules")
        return super().named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the stages of this rank, under the names of the whole model."""
        self._require_stages("state")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the stages of this rank."""
        self._require_stages("state")
        return super().load_state_dict(*args, **kwargs)

    def _require_stages(self, thing: str) -> None:
        """Build the stages that `initialize` will give this rank, if the number of ranks tells which."""
        if self.boundaries is not None:
            return
        count, ranks = self.num_stages, _ranks()
        if count is not None and ranks % count == 0 and not self.measures and torch.distributed.is_initialized():
            # Ranks of one stage are consecutive. `build` refuses other stages.
            self.build([torch.distributed.get_rank() * count // ranks], count)
            self.assumed = True
            return
        raise UsageError(
            f"PipelineModule: the {thing} of this rank are unknown before its stages are built. Call "
            "shardwise.initialize first (an optimizer can be a function of the parameters), or build(); or pass "
            "num_stages, call init_distributed first, and divide the layers without measured times"
        )


def _requested(num_stages: int | None, topology: ProcessTopology | None) -> int | None:
    of_topology = topology.get_dim("pipe") if topology is not None else None
    if num_stages is not None and num_stages < 1:
        raise ConfigError(f"num_stages: expected at least 1 pipeline stage, found {num_stages}")
    if num_stages is not None and of_topology is not None and num_stages != of_topology:
        raise ConfigError(
            f"PipelineModule: num_stages={num_stages} contradicts the topology, whose axis 'pipe' has {of_topology} "
            "ranks. Pass one of the two"
        )
    return num_stages or of_topology or None


def _ranks() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def _merge(root: nn.Module, other: nn.Module) -> None:
    """Register the children and parameters of another tree of containers; a real module replaces its alias."""
    for name, parameter in other._parameters.items():
        root.register_parameter(name, parameter)
    for name, child in other._modules.items():
        known = root._modules.get(name)
        if child is None or child is known or (known is not None and isinstance(child, Alias)):
            continue
        if known is None or isinstance(known, Alias):
            root._modules[name] = child
        else:
            root._modules[name] = merged = nn.ModuleDict()
            _merge(merged, known)
            _merge(merged, child)


def measure(
    layers: Layers, sample: Any, device: torch.device | str | None = None, repeats: int = 5, warmup: int = 2
) -> list[LayerCost]:
    """Measure time (median) and memory of forward and backward of each layer, on copies of the layers."""
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu"
    device, costs = torch.device(device), []
    value = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, sample)
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for i, cost in enumerate(layers.costs()):
            stage = copy.deepcopy(layers.build(0, i, i + 1, Recompute()))
            layers.materialize(stage, device)
            samples = [_timed(stage, value, device) for _ in range(warmup + repeats)]
            seconds = statistics.median(seconds for seconds, _, _ in samples[warmup:])
            value, saved = samples[-1][1:]
            own = sum(p.numel() * p.element_size() for p in stage.parameters())
            costs.append(replace(cost, seconds=seconds, bytes=own + saved))
    return costs


def _timed(stage: PipelineStage, value: Any, device: torch.device) -> tuple[float, Any, int]:
    """Return seconds of a forward and backward pass, the output, and the bytes of saved activations."""
    own, saved = {p.untyped_storage().data_ptr() for p in stage.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def leaf(item: Any) -> Any:
        return item.detach().requires_grad_(item.is_floating_point()) if isinstance(item, torch.Tensor) else item

    value = tree_map(leaf, value)
    _synchronize(device)
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(value)
    results = [item for item in tree_leaves(output) if isinstance(item, torch.Tensor) and item.requires_grad]
    sources = [item for item in [*tree_leaves(value), *stage.parameters()] if getattr(item, "requires_grad", False)]
    if results and sources:
        torch.autograd.grad(results, sources, [torch.ones_like(item) for item in results], allow_unused=True)
    _synchronize(device)
    return time.perf_counter() - start, tree_map(leaf, output), sum(saved.values())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
