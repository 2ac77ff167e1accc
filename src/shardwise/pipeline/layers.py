"""Layers of pipeline models: specifications, shared parameters, and stages that are built from layers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardwise.errors import UsageError
from shardwise.pipeline.partition import LayerCost


@dataclass
class Recompute:
    """Activation checkpointing of the layers of all stages.

    Attributes:
        interval: number of adjacent layers in a checkpointed group; 0: none.
        function: called as `function(run, *tensors)`; None: `checkpoint`.
        classes: class names of the layers to checkpoint; None: the layers that have parameters.
        checkpoint: torch's non-reentrant checkpointing; an engine's follows the section `activation_checkpointing`.
    """

    interval: int = 0
    function: Callable[..., Any] | None = None
    classes: Collection[str] | None = None
    checkpoint: Callable[..., Any] = field(default=partial(torch_checkpoint.checkpoint, use_reentrant=False))

    def covers(self, layers: Iterable[Any]) -> bool:
        """Return True if a group of layers is checkpointed."""
        if not self.interval or not torch.is_grad_enabled():
            return False
        if self.classes is not None:
            return all(type(layer).__name__ in self.classes for layer in layers)
        return any(isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for layer in layers)

    def __call__(self, layers: Sequence[Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run` of a group of layers, under activation checkpointing if the group is covered.

        All tensors are positional arguments of the checkpointing function.
        """
        if not self.covers(layers):
            return run(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in places]
        calls = 0
        for i in places:
            leaves[i] = None

        def call(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            filled = list(leaves)
            for i, tensor in zip(places, given, strict=True):
                filled[i] = tensor
            own_args, own_kwargs = tree_unflatten(filled[: form.num_leaves], form)
            with _on_copies(layers if calls > 1 else ()):
                return run(*own_args, **own_kwargs)

        if self.function is not None:
            if not any(tensor.requires_grad for tensor in tensors):
                # Because re-entrant functions give no gradients if no input requires one, as for token numbers.
                places.append(len(leaves))
                leaves.append(None)
                tensors.append(torch.empty(0, requires_grad=True, device="cpu"))
            return self.function(call, *tensors)
        return self.checkpoint(call, *tensors)


@contextmanager
def _on_copies(layers: Iterable[Any]) -> Iterator[None]:
    """Let BatchNorm update copies of its running statistics, because the first computation has updated them."""
    modules = [module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
    tables = [(module._buffers, {**module._buffers}) for module in modules if isinstance(module, _BatchNorm)]
    for table, buffers in tables:
        table.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for table, buffers in tables:
            table.update(buffers)


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
            holder.add_module(module, Alias())
        holder.get_submodule(module).register_parameter(own, parameter)


_STAGE_NAME = re.compile(r"stages\.(\d+)\.(.+)")


class Alias(nn.Module):
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

    def shared_modules(self) -> dict[str, tuple[int, ...]]:
        """Return the names of modules that several layers are, and these layers."""
        return {}

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
    """Layers as specifications, modules, and functions.

    Args:
        layers: specifications, modules and functions in order, or an nn.Sequential.
        seeds: a seed for each layer.
        seed_fn: called with the seed before a layer is built; None: seeds torch.
        names: of the layers' modules in the whole model; None: `layers.i` for layer i.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        seeds: Sequence[int] = (),
        seed_fn: Callable[[int], Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._entries, self._seeds, self._seed_fn = list(layers), seeds, seed_fn
        self._names = [f"layers.{i}" for i in range(len(self._entries))] if names is None else list(names)
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
                own = {f"{self._names[self._firsts[key]]}.{attr}": None for attr in entry.tied_weight_attr}
            elif key is not None or isinstance(entry, nn.Module):
                outline = self._outline(home)
                found = () if outline is None else outline.named_parameters()
                own = {f"{self._names[home]}.{n}": p for n, p in found}
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

    def shared_modules(self) -> dict[str, tuple[int, ...]]:
        """Return the names of modules that several layers are, and these layers."""
        users = {home: tuple(i for i, other in enumerate(self._homes) if other == home) for home in self._homes}
        return {self._names[home]: layers for home, layers in users.items() if len(layers) > 1}

    def build(self, number: int, first: int, last: int, recompute: Recompute) -> PipelineStage:
        """Return a stage of the layers from `first` to before `last`."""
        stage = _LayerStage(number, first, last, recompute)
        modules = {home: self._module(home) for home in sorted(set(self._homes[first:last]))}
        used = {id(p) for module in modules.values() if module is not None for p in module.parameters()}
        for name, parameter in self._shared.items():
            # The name in this stage is that of the whole model, which may be of a layer on another stage.
            if id(parameter) in used and not any(name.startswith(f"{self._names[home]}.") for home in modules):
                stage.add_alias(name, parameter)
        for home, module in modules.items():
            if module is not None:
                stage.add(self._names[home], module)
        for i in range(first, last):
            entry, home = self._entries[i], self._homes[i]
            function = entry.forward_fn if isinstance(entry, TiedLayerSpec) else None
            stage.calls.append((None, entry) if modules[home] is None else (self._names[home], function))
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
            name, where = f"{self._names[first]}.{attr}", f"TiedLayerSpec {entry.key!r}: layer {home} ({entry!r})"
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
        # (name of a module, function of module and input) or (None, function of the input), in order
        self.calls: list[tuple[str | None, Any]] = []

    def forward(self, *inputs: Any) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        size = self.recompute.interval or len(self.calls)
        for start in range(0, len(self.calls), size):
            group = self.calls[start : start + size]
            modules = [function if name is None else self.get_submodule(name) for name, function in group]
            value = self.recompute(modules, partial(self._run, group), value)
        return value

    def _run(self, group: Sequence[tuple[str | None, Any]], value: Any) -> Any:
        for name, function in group:
            module = None if name is None else self.get_submodule(name)
            value = function(value) if module is None else function(module, value) if function else module(value)
        return value


class OwnStages(Layers):
    """Stages that the client has built, one module for each stage of this rank; module of stage i is `stages.i`.

    `tied` are the names of each parameter that stages share.
    """

    def __init__(self, modules: Sequence[nn.Module], tied: Sequence[Sequence[str]] = ()) -> None:
        self._modules = list(modules)
        self._places: dict[int, int] = {}
        self._shared: dict[str, nn.Parameter] = {}
        self._tied: dict[str, list[tuple[int, str]]] = {}  # by first name: stage, and name in it
        for names in tied:
            found = [_STAGE_NAME.fullmatch(name) for name in names]
            if len(names) < 2 or not all(found):
                raise UsageError(
                    f"PipelineModule.from_stages: tied_weights has {list(names)!r}: expected names of one parameter in "
                    "two stages or more, such as ['stages.0.words.weight', 'stages.3.head.weight']"
                )
            self._tied[names[0]] = [(int(match[1]), match[2]) for match in found if match is not None]

    def costs(self) -> list[LayerCost]:
        """Return name and number of parameters of each stage of this rank."""
        return [LayerCost(type(m).__name__, sum(p.numel() for p in m.parameters())) for m in self._modules]

    def ties(self) -> list[TiedParameter]:
        """Return the parameters that stages share."""
        return [
            TiedParameter(name, name, tuple(sorted({stage for stage, _ in users})))
            for name, users in self._tied.items()
        ]

    def build(self, number: int, first: int, last: int, recompute: Recompute) -> PipelineStage:
        """Return a stage; the first call is for the first module."""
        stage, place = _LayerStage(number, first, last, recompute), self._places.setdefault(number, len(self._places))
        if place < len(self._modules):  # `keep` checks the number of modules
            self._tie(stage, self._modules[place])  # first, because a parameter has the first of its names
            stage.add(f"stages.{number}", self._modules[place])
            stage.calls.append((f"stages.{number}", None))
        return stage

    def _tie(self, stage: PipelineStage, module: nn.Module) -> None:
        """Share parameters of a stage with the other stages of this rank, and give them their names in the model."""
        for name, users in self._tied.items():
            own = [path for number, path in users if number == stage.number]
            for path in own:
                try:
                    holder, value = module.get_submodule(path.rpartition(".")[0]), module.get_parameter(path)
                except AttributeError as error:
                    raise UsageError(
                        f"PipelineModule.from_stages: tied_weights names stages.{stage.number}.{path}, and the module "
                        "of that stage has no such parameter"
                    ) from error
                shared = self._shared.setdefault(name, value)
                if shared.shape != value.shape:
                    raise UsageError(
                        f"PipelineModule.from_stages: tied_weights: stages.{stage.number}.{path} is "
                        f"{tuple(value.shape)}, and {name} {tuple(shared.shape)}. Tie parameters of one shape"
                    )
                holder.register_parameter(path.rpartition(".")[2], shared)
            if own and users[0][0] != stage.number:
                stage.add_alias(name, self._shared[name])

    def keep(self, layers: Collection[int]) -> None:
        """Check that each module is a stage of this rank."""
        if len(layers) != len(self._modules):
            raise UsageError(
                f"PipelineModule.from_stages: {len(self._modules)} modules were passed, and this rank has the stages "
                f"{sorted(layers)}. Pass one module for each stage of the rank (pipeline.chunks), in order"
            )
