"""Layers and stages of Hugging Face models.

A stage runs the model's own forward method. Blocks and modules of other stages are stand-ins without parameters. The
stand-ins before the first block of the stage return placeholders or received tensors. The forward pass ends
after the last block of the stage. So masks, positions and rotary embeddings are computed by the model's own code.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.layers import Layers, PipelineStage, Recompute, TiedParameter, seeded
from shardwise.pipeline.partition import LayerCost


@dataclass
class Plan:
    """Order and data flow of a model's forward pass.

    Attributes:
        lists: names of the lists of blocks, in the order of their calls.
        segments: for modules outside of the blocks, the numbers of the lists before which a module is called.
        widens: modules whose output has one dimension more than their input.
        tuples: for each list, the length of a block's output tuple; 0: the output is a tensor.
        carried: for each list, names of block arguments that depend on parameters: of the first, and of later blocks.
        dropped: fields of the output that only a stage with all layers can compute.
    """

    lists: list[str]
    segments: dict[str, set[int]] = field(default_factory=dict)
    widens: set[str] = field(default_factory=set)
    tuples: list[int] = field(default_factory=list)
    carried: list[tuple[set[str], set[str]]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)


class TransformerLayers(Layers):
    """Layers of a Hugging Face model, made by `to_layers`."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.plan, self.main_input = plan, model.main_input_name
        self.loss_fn = model_loss
        lists = [model.get_submodule(name) for name in plan.lists]
        # (list, number of a block), or (segment, None)
        self.places: list[tuple[int, int | None]] = []
        for number, blocks in enumerate(lists):
            self.places += [(number, None), *((number, i) for i in range(len(blocks)))]
        self.places.append((len(lists), None))
        self.arguments = [list(inspect.signature(type(blocks[0]).forward).parameters)[1:] for blocks in lists]
        blocks = {f"{name}.{i}": b for name, of in zip(plan.lists, lists, strict=True) for i, b in enumerate(of)}
        pieces = dict(pieces_of(model, plan.lists))
        if unknown := sorted(set(pieces) - set(plan.segments)):
            raise ConfigError(f"{type(model).__name__}: the compared small model has no module {', '.join(unknown)}")
        known, order = blocks | pieces, model.named_modules(remove_duplicate=False)
        self.modules = {name: known[name] for name, _ in order if name in known}
        self.shells = {name: _shell(module) for name, module in self.modules.items()}
        self.template = _skeleton(model, set(self.modules) | set(plan.lists))
        self.stateless = {name for name, piece in pieces.items() if not piece.state_dict()}
        self.sizes = {name: p.numel() for name, p in _every(model)}
        firsts: dict[int, str] = {}
        self.canonical = {name: firsts.setdefault(id(p), name) for name, p in _every(model)}
        self.parts = [self._part(number, block, pieces) for number, block in self.places]
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        # A stage may have a shared parameter without the module whose initialization gives the values.
        shared = {self.module_of(tie.name) for tie in self.ties()}
        self.sources = {n: copy.deepcopy(self.modules[n]) for n in sorted(shared) if _on_meta(self.modules[n])}

    def module_of(self, parameter: str) -> str:
        """Return the name of the module that has a parameter."""
        return next(name for name in self.shells if parameter.startswith(f"{name}."))

    def _part(self, number: int, block: int | None, pieces: Collection[str]) -> list[str]:
        """Return the names of the modules of a layer that have state."""
        if block is not None:
            return [f"{self.plan.lists[number]}.{block}"]
        used = {n for name in pieces if self.plan.segments[name] for n in self._parameters([name])}
        used |= {self.canonical[name] for name in used}

        def here(name: str) -> bool:
            if self.plan.segments[name]:
                return number in self.plan.segments[name]
            # A module without calls: its parameters are those of other modules, or belong to the first layer.
            return number == 0 and not used.issuperset(self._parameters([name]))

        return [name for name in pieces if name not in self.stateless and here(name)]

    def _parameters(self, modules: Collection[str]) -> list[str]:
        starts = tuple(f"{module}." for module in modules)
        return [name for name in self.canonical if name.startswith(starts)]

    def _unique(self, layer: int) -> set[str]:
        return {self.canonical[name] for name in self._parameters(self.parts[layer])}

    def costs(self) -> list[LayerCost]:
        """Return name and number of parameters of each layer."""
        titles = {0: "Embedding", len(self.plan.lists): "Head"}
        found = []
        for layer, (number, block) in enumerate(self.places):
            part = self.parts[layer][0] if block is not None else None
            title = titles.get(number, "DecoderEmbedding") if part is None else type(self.shells[part]).__name__
            found.append(LayerCost(title, sum(self.sizes[name] for name in self._unique(layer))))
        return found

    def ties(self) -> list[TiedParameter]:
        """Return the shared parameters and the layers that use each."""
        users: dict[str, list[int]] = {}
        for layer in range(len(self.places)):
            for name in sorted(self._unique(layer)):
                users.setdefault(name, []).append(layer)
        return [TiedParameter(name, name, tuple(found)) for name, found in users.items() if len(found) > 1]

    def build(self, number: int, first: int, last: int, recompute: Recompute) -> PipelineStage:
        """Return a stage of the layers from `first` to before `last`."""
        for name in (name for layer in range(first, last) for name in self.parts[layer]):
            if name not in self.modules:
                raise UsageError(f"{name} has been dropped, because this rank did not need the module's layer")
        return _TransformerStage(number, first, last, self, recompute)

    def keep(self, layers: Collection[int]) -> None:
        """Drop all modules except those of some layers and those without state."""
        names = self.stateless.union(*(self.parts[layer] for layer in layers))
        self.modules = {name: module for name, module in self.modules.items() if name in names}

    def materialize(self, stage: PipelineStage, device: torch.device | str) -> None:
        """Move a stage to a device; modules on the meta device are initialized, each under a seed of its own."""
        assert isinstance(stage, _TransformerStage)
        for name in stage.own:
            module = stage.get_submodule(name)
            if _on_meta(module):
                self._initialize(name, module, device)
        stage.tie()
        for name, source in self.sources.items():
            aliases = [alias for alias in stage.aliases if alias.startswith(f"{name}.")]
            if aliases:
                module = copy.deepcopy(source)
                self._initialize(name, module, device)
                with torch.no_grad():
                    for alias in aliases:
                        stage.get_parameter(alias).copy_(module.get_parameter(alias.removeprefix(f"{name}.")))
        stage.to(device)

    def _initialize(self, name: str, module: nn.Module, device: torch.device | str) -> None:
        module.to_empty(device=device)
        owner = child = self.template
        for part in name.split("."):
            owner = child if hasattr(child, "_init_weights") else owner
            child = child._modules.get(part, child)
        with torch.no_grad(), seeded((self.seed + zlib.crc32(name.encode())) % 2**63):
            marks = {own: _mark(tensor) for own, tensor in _tensors(module)}
            _initialize_tree(module, owner)
            for own, tensor in _tensors(module):
                if marks[own] and bool((tensor.isnan() if tensor.is_floating_point() else tensor == _UNSET).any()):
                    raise UsageError(
                        f"{name}.{own}: _init_weights of the model gives no value to this tensor, which was on the "
                        "meta device. Build the model on the CPU, or build without `device` and load a checkpoint"
                    )


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _tensors(module))


_UNSET = -113


def _mark(tensor: torch.Tensor) -> bool:
    """Fill a tensor with values that an initialization must replace; False: no value of the dtype is unusual."""
    if tensor.dtype is torch.bool or tensor.dtype is torch.uint8:
        return False
    tensor.fill_(float("nan") if tensor.is_floating_point() else _UNSET)
    return True


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _initialize_tree(module: nn.Module, owner: Any) -> None:
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        _initialize_tree(child, owner)
    owner._init_weights(module)


def model_loss(output: Any, labels: Any = None) -> Any:
    """Return the loss that a Hugging Face model has computed from the labels in its inputs."""
    del labels
    if getattr(output, "loss", None) is None:
        raise UsageError("The model's output has no loss. Put `labels` into the inputs, or pass a loss_fn")
    return output.loss


class _Stop(BaseException):
    """Ends the forward pass of a stage that others follow; no Exception, because model code may catch these."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = values


class _Gate:
    """Stands in a list of blocks for one block. The stage decides if the block runs."""

    def __init__(self, call: Callable[..., Any], shell: Any) -> None:
        self._call, self._shell = call, shell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_call", "_shell"):
            raise AttributeError(name)
        return getattr(self._shell, name)


class _Gates(nn.Module):
    """Stands for a list of blocks, and has gates as items."""

    def __init__(self, gates: list[_Gate]) -> None:
        super().__init__()
        self._gates = gates

    def __getitem__(self, index: Any) -> Any:
        return self._gates[index]

    def __iter__(self) -> Iterator[_Gate]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)


class _Absent(nn.Module):
    """Stands for a module that the stage runs in some parts of the forward pass, or in none."""

    def __init__(self, call: Callable[..., Any], shell: nn.Module) -> None:
        super().__init__()
        self._parts = (call, shell)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._parts[0](args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_parts"][1], name) if "_parts" in self.__dict__ else super().__getattr__(name)


class _TransformerStage(PipelineStage):
    """A stage of `TransformerLayers`."""

    def __init__(self, number: int, first: int, last: int, layers: TransformerLayers, recompute: Recompute) -> None:
        super().__init__(number, first, last)
        if recompute.interval > 1:
            raise ConfigError(
                "activation_checkpoint_interval: blocks of Hugging Face models are recomputed one by one: expected 0 "
                f"or 1, found {recompute.interval}"
            )
        self.recompute, self._plan, self._arguments = recompute, layers.plan, layers.arguments
        self._main_input, self._places = layers.main_input, layers.places
        self._offsets = [self._places.index((number, 0)) for number in range(len(layers.plan.lists))]
        own = {name for layer in range(first, last) for name in layers.parts[layer]}
        self.own = [name for name in layers.modules if name in own or name in layers.stateless]
        self._segments = {segment for segment, block in self._places[first:last] if block is None}
        modules = {name: layers.modules[name] for name in self.own}
        parameters = {f"{name}.{n}": p for name, module in modules.items() for n, p in _every(module)}
        self._canonical = {name: layers.canonical[name] for name in parameters}
        self.aliases = {start for start in self._canonical.values() if start not in self._canonical}
        for name, start in self._canonical.items():
            if start in self.aliases:
                self.add_alias(start, parameters[name])
        for name, module in modules.items():
            self.add(name, module)
        real = {name for name in self.own if self._is_real(name, layers)}
        lengths = {layers.plan.lists[k]: i + 1 for k, i in self._places if i is not None}
        stand_ins: dict[str, nn.Module] = {
            name: _Absent(partial(self._at_piece, name, isinstance(shell, nn.Dropout)), shell)
            for name, shell in layers.shells.items()
            if name in layers.plan.segments and name not in real
        }
        for k, name in enumerate(layers.plan.lists):
            shells = [layers.shells[f"{name}.{i}"] for i in range(lengths[name])]
            stand_ins[name] = _Gates([_Gate(partial(self._at_block, k, i), shell) for i, shell in enumerate(shells)])
        root = _skeleton(layers.template, ())
        holders = dict(root.named_modules())
        self._bound: list[tuple[nn.Module, str, str]] = []
        for name in [*stand_ins, *sorted(real)]:
            holder, _, own_name = name.rpartition(".")
            if name in stand_ins:
                holders[holder]._modules[own_name] = stand_ins[name]
            elif name in layers.plan.segments:
                self._bound.append((holders[holder], own_name, name))
        # A tuple, because the modules of the skeleton are no children.
        self._whole = (root, list(holders.values()))
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(root.forward).parameters else {}
        self._received: dict[str, Any] = {}
        self._replaced: dict[str, Any] = {}
        self._run: list[int] = []
        self._segment = 0

    def _is_real(self, name: str, layers: TransformerLayers) -> bool:
        """Return True if a module of this stage runs in every call. Dropout of other stages must draw no numbers."""
        calls = layers.plan.segments.get(name, set())
        return calls <= self._segments or (name in layers.stateless and not isinstance(layers.shells[name], nn.Dropout))

    def tie(self) -> None:
        """Make the shared parameters of this stage one again, after the modules have got new parameters."""
        first: dict[str, nn.Parameter] = {}
        for name, start in sorted(self._canonical.items(), key=lambda item: item[0] != item[1]):
            holder, _, own = name.rpartition(".")
            module = self.get_submodule(holder)
            shared = first.setdefault(start, module.get_parameter(own))
            module.register_parameter(own, shared)
            if start in self.aliases:
                self.add_alias(start, shared)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root, containers = self._whole
        given = args[0] if args else kwargs
        if self.first > 0:
            inputs, self._received = given["inputs"], given["values"]
        else:
            inputs = self._checked_inputs(given)
        for container in containers:
            container.training = self.training
        for holder, own, name in self._bound:
            holder._modules[own] = self.get_submodule(name)
        try:
            output = root(**inputs, **self._options, return_dict=True)
        except _Stop as stop:
            output = {"inputs": inputs, "values": stop.values}
        else:
            if self.first > 0:
                for name in self._plan.dropped & set(output):
                    output[name] = None
        finally:
            ran, self._received, self._replaced, self._run, self._segment = self._run, {}, {}, [], 0
        wanted = [i for i in range(self.first, self.last) if self._places[i][1] is not None]
        if ran != wanted:
            raise UsageError(
                f"Stage {self.number}: the model called the blocks of the layers {ran} in this forward pass, expected "
                f"{wanted}. Turn off options that skip blocks, as layerdrop"
            )
        return output

    def _checked_inputs(self, given: Any) -> dict[str, torch.Tensor]:
        inputs = {self._main_input: given} if isinstance(given, torch.Tensor) else given
        if not isinstance(inputs, Mapping):
            raise UsageError(
                "The first stage of a Hugging Face model: expected a mapping of arguments of the model, or a tensor of "
                f"{self._main_input}, found {type(given).__name__}"
            )
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if wrong := [name for name, value in inputs.items() if not isinstance(value, torch.Tensor)]:
            raise UsageError(
                f"Inputs of a Hugging Face model: expected tensors, but these are none: {', '.join(wrong)}"
            )
        return inputs

    def _hidden(self) -> torch.Tensor:
        hidden: torch.Tensor = self._received[self._arguments[self._entry_list()][0]]
        return hidden

    def _entry_list(self) -> int:
        """Return the number of the list of blocks from which or in which this stage starts."""
        number, block = self._places[self.first]
        return number if block is not None else number - 1

    def _at_piece(self, name: str, dropout: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._segment in self._segments and self._segment in self._plan.segments[name]:
            return self.get_submodule(name)(*args, **kwargs)
        given = next(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        if dropout:
            return given
        hidden = self._hidden()
        lead = given.shape if name in self._plan.widens else given.shape[:-1]
        return hidden.new_zeros(()).expand(*lead, hidden.shape[-1])

    def _at_block(self, number: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._segment = number + 1
        place = self._offsets[number] + index
        if place < self.first:
            hidden = self._hidden() if number == self._entry_list() else args[0]
            length = self._plan.tuples[number]
            return (hidden, *[None] * (length - 1)) if length else hidden
        names = self._arguments[number]
        if self.first > 0 and number == self._entry_list():
            args, kwargs = self._with_received(names, args, kwargs, place == self.first)
        if place >= self.last:
            carried = sorted(self._plan.carried[number][index > 0])  # all ranks send and receive in this order
            values = {name: _argument(names, name, args, kwargs) for name in carried}
            raise _Stop({name: value for name, value in values.items() if value is not None})
        block = self.get_submodule(f"{self._plan.lists[number]}.{index}")
        self._run.append(place)
        output = self.recompute([block], block, *args, **kwargs)
        if place == self.last - 1 and self._places[place + 1][1] is None:
            raise _Stop({names[0]: output[0] if isinstance(output, tuple) else output})
        return output

    def _with_received(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], entry: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the placeholders in the arguments of a block by the received tensors."""
        changed, options = list(args), dict(kwargs)
        for name, value in self._received.items():
            found = _argument(names, name, args, kwargs)
            if entry:
                self._replaced[name] = found
            elif name not in self._replaced or found is not self._replaced[name]:
                continue
            place = names.index(name) if name in names else len(changed)
            if place < len(changed):
                changed[place] = value
            else:
                options[name] = value
        return tuple(changed), options


def _every(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return all names of all parameters; a shared parameter has several."""
    return module.named_parameters(remove_duplicate=False)


def _argument(names: list[str], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)


def _shell(module: nn.Module) -> nn.Module:
    """Return a copy of a module without parameters, buffers and children."""
    shell = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[table] = {}
    return shell


def _skeleton(module: nn.Module, leaves: Collection[str], prefix: str = "") -> Any:
    """Return a copy of the modules that contain some of the named ones, without these."""
    shell = _shell(module)
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if child is None:
            shell._modules[name] = None
        elif path not in leaves:
            shell._modules[name] = _skeleton(child, leaves, f"{path}.")
    return shell


def pieces_of(module: nn.Module, lists: Collection[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that contain no list of blocks."""
    if own := [name for name, tensor in (module._parameters | module._buffers).items() if tensor is not None]:
        raise ConfigError(
            f"{type(module).__name__}: {prefix}{own[0]} belongs to a module that contains the blocks. A pipeline stage "
            "needs such a tensor in a module of its own"
        )
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if child is None or path in lists:
            continue
        if any(known.startswith(f"{path}.") for known in lists):
            yield from pieces_of(child, lists, f"{path}.")
        else:
            yield path, child
