"""Models as pipeline stages: layer specifications, the pipeline module, and its stages."""

from __future__ import annotations

import copy
import os
import statistics
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.partition import LayerCost, partition
from shardwise.pipeline.topology import ProcessTopology


@dataclass
class Recompute:
    """Activation checkpointing of the layers of all stages.

    Attributes:
        interval: number of adjacent layers in a checkpointed group; 0: none.
        function: called as `function(run, *tensors)`; None: torch's non-reentrant checkpointing.
        classes: class names of the layers to checkpoint; None: the layers that have parameters.
    """

    interval: int = 0
    function: Callable[..., Any] | None = None
    classes: Collection[str] | None = None

    def covers(self, layers: Iterable[Any]) -> bool:
        """Return True if a group of layers is checkpointed."""
        if not self.interval or not torch.is_grad_enabled():
            return False
        if self.classes is not None:
            return all(type(layer).__name__ in self.classes for layer in layers)
        return any(isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for layer in layers)

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run` under activation checkpointing, with all tensors as positional arguments of the function."""
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in places]
        for i in places:
            leaves[i] = None

        def call(*given: Any) -> Any:
            filled = list(leaves)
            for i, tensor in zip(places, given, strict=True):
                filled[i] = tensor
            own_args, own_kwargs = tree_unflatten(filled[: form.num_leaves], form)
            return run(*own_args, **own_kwargs)

        if self.function is not None:
            if not any(tensor.requires_grad for tensor in tensors):
                # Because re-entrant functions give no gradients if no input requires one, as for token numbers.
                places.append(len(leaves))
                leaves.append(None)
                tensors.append(torch.empty(0, requires_grad=True))
            return self.function(call, *tensors)
        return torch_checkpoint.checkpoint(call, *tensors, use_reentrant=False)


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that layers share.

    Attributes:
        key: key of the tied layers; the name of the parameter if the layers have none.
        name: name of the parameter in the whole model, and in every stage that uses the parameter.
        users: numbers of the layers that use the parameter, or of their stages.
    """

    key: str
    name: str
    users: tuple[int, ...]


class PipelineStage(nn.Module):
    """Adjacent layers of a model, under their names in the whole model.

    Attributes:
        number: number of the stage in the model.
        first: number of the first layer.
        last: number after that of the last layer.
    """

    def __init__(self, number: int, first: int, last: int) -> None:
        super().__init__()
        self.number, self.first, self.last = number, first, last

    def add(self, name: str, module: nn.Module) -> None:
        """Register a module under its name in the whole model."""
        parent, _, own = name.rpartition(".")
        _container(self, parent).add_module(own, module)

    def add_alias(self, name: str, parameter: nn.Parameter) -> None:
        """Register a shared parameter under its name in the whole model, where the module of this name is absent."""
        path, _, own = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        holder = _container(self, parent)
        if module not in holder._modules:
            holder.add_module(module, _Alias())
        holder.get_submodule(module).register_parameter(own, parameter)


class _Alias(nn.Module):
    """Has parameters of a module that is on another stage."""


def _container(root: nn.Module, path: str) -> nn.Module:
    for part in filter(None, path.split(".")):
        if part not in root._modules:
            root.add_module(part, nn.ModuleDict())
        root = root.get_submodule(part)
    return root


class Layers(ABC):
    """The layers of a model in order, from which stages are built.

    Attributes:
        loss_fn: the loss of the model's output and the labels, if the model has one.
    """

    loss_fn: Callable[..., Any] | None = None

    @abstractmethod
    def costs(self) -> list[LayerCost]:
        """Return name and number of parameters of each layer."""

    @abstractmethod
    def ties(self) -> list[TiedParameter]:
        """Return the shared parameters and the layers that use each."""

    @abstractmethod
    def build(self, number: int, first: int, last: int, recompute: Recompute) -> PipelineStage:
        """Return a stage of the layers from `first` to before `last`; layers that have been built are used again."""

    @abstractmethod
    def keep(self, layers: Collection[int]) -> None:
        """Drop all layers except some."""

    def materialize(self, stage: PipelineStage, device: torch.device | str) -> None:
        """Move a stage to a device, and initialize its parameters that have no values yet."""
        stage.to(device)


class LayerSpec:
    """A layer that is built on the ranks that need the layer.

    Args:
        typename: subclass of nn.Module.
        args: positional arguments of the class.
        kwargs: keyword arguments of the class.

    >>> LayerSpec(nn.Linear, 2, 3, bias=False).build()
    Linear(in_features=2, out_features=3, bias=False)
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__}: expected a subclass of torch.nn.Module, found {typename!r}. Pass functions "
                "and built modules as layers without a specification"
            )
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer; `log` prints its specification."""
        if log:
            print(f"Building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        values = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *values])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with all layers of the same key.

    Layers of equal class and arguments are one module. Layers of another class or other arguments share the parameters
    of `tied_weight_attr` with the first layer of the key, and have their own other parameters.

    Args:
        key: name of the shared layer.
        typename: subclass of nn.Module.
        args: positional arguments of the class.
        forward_fn: called as `forward_fn(module, input)` in place of the module.
        tied_weight_attr: name or names of the shared parameters.
        kwargs: keyword arguments of the class.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def same_module(self, other: TiedLayerSpec) -> bool:
        """Return True if two layers of one key are one module."""
        mine, theirs = (tree_leaves([spec.module_args, spec.module_kwargs]) for spec in (self, other))
        return (
            self.typename is other.typename
            and self.module_kwargs.keys() == other.module_kwargs.keys()
            and len(mine) == len(theirs)
            and all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(mine, theirs, strict=True))
        )


@contextmanager
def seeded(seed: int, seed_fn: Callable[[int], Any] | None = None) -> Iterator[None]:
    """Seed the random generators in a block, and restore the state of torch's generators after it."""
    # torch.manual_seed would also seed a CUDA device that is initialized later.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        if seed_fn is not None:
            seed_fn(seed)
        else:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
        yield


class SpecLayers(Layers):
    """Layers as specifications, modules, and functions; the module of layer i is named `layers.i`.

    Args:
        layers: specifications, modules and functions in order, or an nn.Sequential.
        seeds: a seed for each layer.
        seed_fn: called with the seed before a layer is built; None: seeds torch.
    """

    def __init__(self, layers: Sequence[Any], seeds: Sequence[int], seed_fn: Callable[[int], Any] | None) -> None:
        self._entries, self._seeds, self._seed_fn = list(layers), seeds, seed_fn
        self._homes: list[int] = []
        self._modules: dict[int, nn.Module] = {}
        self._firsts: dict[str, int] = {}
        self._shared: dict[str, nn.Parameter] = {}
        for i, entry in enumerate(self._entries):
            self._homes.append(self._home_of(i, entry))
            if isinstance(entry, nn.Module):
                self._modules.setdefault(self._homes[i], entry)
        self._ties, self._costs = self._find_ties(), self._find_costs()

    def _home_of(self, i: int, entry: Any) -> int:
        """Return the number of the first layer that is the same module."""
        if isinstance(entry, TiedLayerSpec):
            first = self._firsts.setdefault(entry.key, i)
            return first if entry.same_module(self._entries[first]) else i
        if isinstance(entry, nn.Module):
            return next(home for home, other in enumerate(self._entries) if other is entry)
        if isinstance(entry, type) or not (isinstance(entry, LayerSpec) or callable(entry)):
            raise UsageError(
                f"PipelineModule: layer {i}: expected a LayerSpec, a module or a function, found {entry!r}. Write "
                "LayerSpec(Class, arguments...) for a class"
            )
        return i

    def _find_costs(self) -> list[LayerCost]:
        costs = []
        for i, home in enumerate(self._homes):
            entry, module = self._entries[i], self._outline(home)
            name = type(module).__name__ if module is not None else getattr(entry, "__name__", type(entry).__name__)
            costs.append(LayerCost(name, 0 if module is None else sum(p.numel() for p in module.parameters())))
        return costs

    def _outline(self, home: int) -> nn.Module | None:
        """Return a module like that of a layer, perhaps on the meta device; None for functions."""
        entry = self._modules.get(home, self._entries[home])
        if not isinstance(entry, LayerSpec):
            return entry if isinstance(entry, nn.Module) else None
        try:
            with torch.device("meta"), seeded(0):
                return entry.build()
        except Exception:  # some constructors read values
            return self._seeded_module(home)

    def _seeded_module(self, home: int) -> nn.Module:
        with seeded(self._seeds[home], self._seed_fn):
            module: nn.Module = self._entries[home].build()
        return module

    def _find_ties(self) -> list[TiedParameter]:
        users: dict[str, tuple[str, list[int]]] = {}
        names: dict[int, str] = {}
        for i, home in enumerate(self._homes):
            entry = self._entries[i]
            key = entry.key if isinstance(entry, TiedLayerSpec) else None
            own: dict[str, nn.Parameter | None] = {}
            if key is not None and home != self._firsts[key]:
                own = {f"layers.{self._firsts[key]}.{attr}": None for attr in entry.tied_weight_attr}
            elif key is not None or isinstance(entry, nn.Module):
                outline = self._outline(home)
                own = {f"layers.{home}.{n}": p for n, p in outline.named_parameters()} if outline is not None else {}
            for name, parameter in own.items():
                if isinstance(entry, nn.Module) and parameter is not None:
                    name = names.setdefault(id(parameter), name)
                    self._shared[name] = parameter
                users.setdefault(name, (key or name, []))[1].append(i)
        ties = [TiedParameter(key, name, tuple(found)) for name, (key, found) in users.items() if len(found) > 1]
        self._shared = {tie.name: self._shared[tie.name] for tie in ties if tie.name in self._shared}
        return ties

    def costs(self) -> list[LayerCost]:
        """Return name and number of parameters of each layer."""
        return self._costs

    def ties(self) -> list[TiedParameter]:
        """Return the shared parameters and the layers that use each."""
        return self._ties

    def build(self, number: int, first: int, last: int, recompute: Recompute) -> PipelineStage:
        """Return a stage of the layers from `first` to before `last`."""
        stage = _LayerStage(number, first, last, recompute)
        modules = {home: self._module(home) for home in sorted(set(self._homes[first:last]))}
        used = {id(p) for module in modules.values() if module is not None for p in module.parameters()}
        for name, parameter in self._shared.items():
            # The name in this stage is that of the whole model, which may be of a layer on another stage.
            if id(parameter) in used and int(name.split(".")[1]) not in modules:
                stage.add_alias(name, parameter)
        for home, module in modules.items():
            if module is not None:
                stage.add(f"layers.{home}", module)
        for i in range(first, last):
            entry, home = self._entries[i], self._homes[i]
            function = entry.forward_fn if isinstance(entry, TiedLayerSpec) else None
            stage.calls.append((None, entry) if modules[home] is None else (home, function))
        return stage

    def _module(self, home: int) -> nn.Module | None:
        """Return the module of a layer, which is built if it is new; None for functions."""
        entry = self._entries[home]
        if home not in self._modules and isinstance(entry, _Dropped):
            raise UsageError(
                f"Layer {home} ({entry.name}) was passed as a built module, and has been dropped because this rank did "
                "not need the layer. Pass a LayerSpec"
            )
        if home not in self._modules and not isinstance(entry, LayerSpec):
            return None
        if home not in self._modules:
            self._modules[home] = self._seeded_module(home)
            if isinstance(entry, TiedLayerSpec):
                self._tie(home, entry, self._modules[home])
        return self._modules[home]

    def _tie(self, home: int, entry: TiedLayerSpec, module: nn.Module) -> None:
        """Share parameters of a new module with the first layer of its key."""
        first = self._firsts[entry.key]
        for attr in entry.tied_weight_attr:
            name, where = f"layers.{first}.{attr}", f"TiedLayerSpec {entry.key!r}: layer {home} ({entry!r})"
            owner, _, own = attr.rpartition(".")
            try:
                holder = module.get_submodule(owner)
                value = getattr(holder, own)
            except AttributeError as error:
                raise UsageError(f"{where} has no {attr}. Correct tied_weight_attr") from error
            if not any(tie.name == name for tie in self._ties):
                continue
            if name not in self._shared:
                source = self._modules[first] if first in self._modules else self._seeded_module(first)
                self._shared[name] = source.get_parameter(attr)
            shared = self._shared[name]
            if value is not shared:
                if not isinstance(value, nn.Parameter) or value.shape != shared.shape:
                    found = tuple(value.shape) if isinstance(value, nn.Parameter) else type(value).__name__
                    raise UsageError(f"{where}: {attr}: expected a parameter {tuple(shared.shape)}, found {found}")
                holder.register_parameter(own, shared)

    def keep(self, layers: Collection[int]) -> None:
        """Drop all layers except some."""
        homes = {self._homes[i] for i in layers}
        users = {tie.name: tie.users for tie in self._ties}
        self._modules = {home: module for home, module in self._modules.items() if home in homes}
        self._shared = {name: p for name, p in self._shared.items() if set(users[name]) & set(layers)}
        for i, entry in enumerate(self._entries):
            if isinstance(entry, nn.Module) and self._homes[i] not in homes:
                self._entries[i] = _Dropped(type(entry).__name__)


@dataclass(frozen=True)
class _Dropped:
    """Stands for a module that was passed as a layer, and is on other ranks."""

    name: str


class _LayerStage(PipelineStage):
    """A stage of `SpecLayers`. Each layer is called with the result of the layer before."""

    def __init__(self, number: int, first: int, last: int, recompute: Recompute) -> None:
        super().__init__(number, first, last)
        self.recompute = recompute
        # (number in `layers`, function of module and input) or (None, function of the input), in order
        self.calls: list[tuple[int | None, Any]] = []

    def forward(self, *inputs: Any) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        size = self.recompute.interval or len(self.calls)
        for start in range(0, len(self.calls), size):
            group = self.calls[start : start + size]
            modules = [function if home is None else self._layer(home) for home, function in group]
            run = partial(self._run, group)
            value = self.recompute(run, value) if self.recompute.covers(modules) else run(value)
        return value

    def _layer(self, home: int) -> nn.Module:
        return self.get_submodule(f"layers.{home}")

    def _run(self, group: Sequence[tuple[int | None, Any]], value: Any) -> Any:
        for home, function in group:
            if home is None:
                value = function(value)
            else:
                value = self._layer(home)(value) if function is None else function(self._layer(home), value)
        return value


class PipelineModule(nn.Module):
    """A model as a sequence of layers, of which each rank builds those of its pipeline stages.

    Each layer is called with the result of the layer before: a tensor, or a tuple of tensors as one argument.
    Parameters have the names of the whole model (`layers.3.weight`) on any number of stages.

    Weights do not depend on the number of stages, because each layer is built under a seed of its own. With
    `seed_layers`, the seed of layer i is `base_seed` + i. Else one draw from torch's CPU generator gives all seeds; all
    ranks must make this draw from the same state. Building layers does not change torch's generators.

    One process has all stages from the start; the module is then an ordinary model. On several ranks the stages are
    built by `build`, which the engine calls.

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
        dynamic_shape: accepted for compatibility without effect; shapes may always differ between micro-batches.
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
        if _ranks() == 1:
            self.build(range(self.num_stages or 1), self.num_stages or 1)

    def topology(self) -> ProcessTopology | None:
        """Return the requested topology."""
        return self._topology

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
        self.boundaries = self.partition(count, costs)
        parts = list(pairwise(self.boundaries))
        numbers = sorted(set(stages))
        if not numbers or not 0 <= numbers[0] <= numbers[-1] < count:
            raise UsageError(f"PipelineModule.build: expected stages of 0 to {count - 1}, found {numbers}")
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
    def stages(self) -> tuple[PipelineStage, ...]:
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
        """Set training mode of all stages."""
        super().train(mode)
        for stage in self.stages:
            stage.train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return names and parameters of the stages of this rank."""
        self._require_stages("parameters")
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the stages of this rank, under the names of the whole model."""
        self._require_stages("state")
        return super().state_dict(*args, **kwargs)

    def _require_stages(self, thing: str) -> None:
        if self.boundaries is None:
            raise UsageError(
                f"PipelineModule: the {thing} of this rank are unknown before its stages are built. Call "
                "shardwise.initialize first (an optimizer can be a function of the parameters), or build()"
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
        if child is None or child is known or (known is not None and isinstance(child, _Alias)):
            continue
        if known is None or isinstance(known, _Alias):
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
