"""Memory sources of a module's training: model, gradients, optimizer, activations.

The division follows Sohoni et al., "Low-memory neural network training: a technical report" (2019), with separate
gradients and optimizer. Activations are counted as the outputs of layers, by hooks, and exactly, as the memory that
autograd saves for the backward pass. Tests compare the two transformer formulas with both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from shardwise.compat import without_overrides
from shardwise.errors import UsageError
from shardwise.memory.dryrun import fake_copy, fake_values, undisturbed
from shardwise.memory.optimizer import state_bytes
from shardwise.memory.report import as_text, readable
from shardwise.memory.watch import Watch
from shardwise.trees import tensors_in

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | str
"""An optimizer, a class or factory of optimizers, or the name of a class in torch.optim."""


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes of one module (`name` as in `named_modules()`) in each source, without its children.

    A shared parameter belongs to the first module with it. `outputs`: new memory of its calls' results, if it calls no
    other module. `saved`: memory that autograd saves while it is the innermost running module, at the first save of
    each storage.
    """

    name: str
    kind: str
    model: int
    gradient: int
    optimizer: int
    outputs: int
    saved: int


@dataclass(frozen=True)
class MemorySources:
    """Bytes of a module's training, by source; activations are None without inputs.

    Attributes:
        model, gradient: parameters (tied ones once), and one gradient for each trained parameter, in its dtype.
        optimizer: optimizer state, including step counters.
        optimizer_counters: the part independent of parameter sizes (Adam's step counts).
        activation_outputs: memory of the inputs, and of the outputs of all modules that call no other, once.
        activation_saved: distinct memory that autograd holds at the end of the forward pass (and of the loss, if
            given), without parameters, buffers and their views.
    """

    model: int
    buffers: int
    gradient: int
    optimizer: int
    optimizer_counters: int
    inputs: int
    activation_outputs: int | None
    activation_saved: int | None
    modules: tuple[ModuleMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Model, buffers, gradients, optimizer state and saved activations, without temporaries."""
        return self.model + self.buffers + self.gradient + self.optimizer + (self.activation_saved or 0)

    def under(self, name: str) -> ModuleMemory:
        """Return the bytes of a module including all modules inside it; a UsageError for an unknown name."""
        inside = [m for m in self.modules if not name or m.name == name or m.name.startswith(f"{name}.")]
        own = next((m for m in inside if m.name == name), None)
        if own is None:
            raise UsageError(f"MemorySources.under({name!r}): there is no module of this name; see named_modules()")
        sums = {
            source: sum(getattr(module, source) for module in inside)
            for source in ("model", "gradient", "optimizer", "outputs", "saved")
        }
        return ModuleMemory(own.name, own.kind, **sums)

    def as_dict(self) -> dict[str, Any]:
        """Return all values and the total as plain JSON values."""
        return {**asdict(self), "total": self.total}

    def render(self, width: int = 100, depth: int = 1) -> str:
        """Return the tables as text; `depth` of the listed modules, which include their inner modules (0: none)."""
        return as_text(self._tables(depth), width)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self._tables(1))

    def _tables(self, depth: int) -> list[Any]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Memory of training, by source", box=box.SIMPLE, collapse_padding=True)
        table.caption, table.caption_justify = Text("\n".join(self.notes)), "left"
        table.add_column("", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        for name, size in (
            ("model", self.model),
            ("buffers", self.buffers),
            ("gradients", self.gradient),
            ("optimizer", self.optimizer),
            ("activations: outputs of layers, and inputs", self.activation_outputs),
            ("activations: saved by autograd", self.activation_saved),
        ):
            table.add_row(name, "-" if size is None else f"{size:,}", readable(size))
        table.add_section()
        table.add_row("total (with saved activations)", f"{self.total:,}", readable(self.total), style="bold")
        if not depth:
            return [table]
        modules = Table(title="By module", box=box.SIMPLE, collapse_padding=True)
        modules.add_column("", no_wrap=True)
        for column in ("model", "gradients", "optimizer", "outputs", "saved"):
            modules.add_column(column, justify="right", no_wrap=True)
        for module in self.modules:
            if not module.name or module.name.count(".") >= depth:
                continue
            sums = self.under(module.name)
            sizes = (sums.model, sums.gradient, sums.optimizer, sums.outputs, sums.saved)
            modules.add_row(f"{module.name} ({module.kind})", *(readable(size) for size in sizes))
        return [table, modules] if modules.row_count else [table]


def memory_sources(
    module: nn.Module,
    *args: Any,
    optimizer: OptimizerLike | None = None,
    loss: Callable[[Any], Any] | None = None,
    dry_run: bool | None = None,
    **kwargs: Any,
) -> MemorySources:
    """Return the memory of a module's training: model, gradients, optimizer state and activations.

    The module runs a forward pass in its current mode and the caller's grad mode (under `torch.no_grad()` nothing is
    saved). Its state stays unchanged: no hooks, no gradients; buffers and RNG state are restored.

    Args:
        module: any module. An engine's module is copied without values, because no rank may wait for another; pass
            `engine.module` and the optimizer's class.
        args: arguments of the module. Without arguments activations are not counted.
        optimizer: an instance, a class or factory (`functools.partial(torch.optim.SGD, momentum=0.9)`), or the
            case-insensitive name of a class in `torch.optim`. None: no optimizer.
        loss: computes the loss of the module's output; its saved tensors then count.
        dry_run: compute on fake tensors, without memory: control flow must not depend on values. None: if the module
            has meta parameters, or belongs to an engine.
        kwargs: keyword arguments of the module.

    Raises:
        UsageError: the optimizer is unknown, misses all parameters, or cannot be stepped; or parameters lack a shape.
        Exception: any error of the module.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
        >>> found = memory_sources(net, torch.randn(4, 512), optimizer="SGD")
        >>> found.model, found.gradient, found.optimizer, found.activation_outputs
        (4200448, 4200448, 0, 32768)
        >>> found.activation_saved  # the inputs of both layers, from which the weights' gradients are computed
        24576
    """
    parameters = _distinct(module.named_parameters())
    lazy = [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UsageError(
            f"memory_sources(): {len(lazy)} parameters have no shape yet ({lazy[0]}); run the module on a batch before"
        )
    notes = []
    states, counters = _states(parameters, optimizer)
    if optimizer is None:
        notes.append("No optimizer is given.")
    watch = None
    if args or kwargs:
        if dry_run is None:
            dry_run = any(p.is_meta for p in parameters.values()) or _waits_for_ranks(module)
            if dry_run:
                notes.append("Computed on fake tensors: the parameters have no values here, or belong to an engine.")
        runner = _on_a_copy if dry_run else _in_place
        watch = runner(module, args, kwargs, loss)
    else:
        notes.append("Activations are counted if inputs are given.")
    owner: dict[int, str] = {}
    names: dict[int, tuple[str, nn.Module]] = {}
    for name, inner in module.named_modules():
        names[id(inner)] = (name, inner)
        for parameter in inner._parameters.values():
            if parameter is not None:
                owner.setdefault(id(parameter), name)
    weights, gradients, state = Counter[str](), Counter[str](), Counter[str]()
    for parameter in parameters.values():
        name = owner[id(parameter)]
        weights[name] += _nbytes(parameter)
        gradients[name] += _nbytes(parameter) if parameter.requires_grad else 0
        state[name] += states.get(id(parameter), 0)
    outputs = watch.outputs if watch is not None else Counter()
    saved = watch.saved if watch is not None else Counter()
    return MemorySources(
        model=sum(weights.values()),
        buffers=sum(_nbytes(b) for b in _distinct(module.named_buffers()).values()),
        gradient=sum(gradients.values()),
        optimizer=sum(state.values()),
        optimizer_counters=counters,
        inputs=watch.inputs if watch is not None else 0,
        activation_outputs=None if watch is None else watch.inputs + sum(outputs.values()),
        activation_saved=None if watch is None else sum(saved.values()),
        modules=tuple(
            ModuleMemory(
                name, type(inner).__name__, weights[name], gradients[name], state[name], outputs[name], saved[name]
            )
            for name, inner in names.values()
        ),
        notes=tuple(notes),
    )


def _distinct(named: Iterator[tuple[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {id(tensor): tensor for _, tensor in named}


def _nbytes(tensor: torch.Tensor) -> int:
    with without_overrides():
        return tensor.numel() * tensor.element_size()


def _waits_for_ranks(module: nn.Module) -> bool:
    """True if calling the module may be a collective, because it belongs to an engine."""
    return any(
        getattr(hook, "may_wait_for_ranks", False)
        for inner in module.modules()
        for hook in inner._forward_pre_hooks.values()
    )


# -- optimizer ---------------------------------------------------------------------------------------------------------


def _states(parameters: dict[int, torch.Tensor], optimizer: OptimizerLike | None) -> tuple[dict[int, int], int]:
    trained = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    if optimizer is None or not trained:
        return {}, 0
    kinds: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    asked, groups = _optimizer(optimizer, trained)
    for key, group in groups.items():
        tensor = trained[key]
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        kinds.setdefault((group, tensor.dtype, device), []).append(key)
    states: dict[int, int] = {}
    counters = 0
    for (group, dtype, device), keys in kinds.items():
        shapes = [tuple(trained[key].shape) for key in keys]
        try:
            found = state_bytes(asked, group, shapes, dtype=dtype, device=device)
        except Exception as error:  # a custom optimizer's step, or one that needs a closure
            raise UsageError(
                f"memory_sources(optimizer=...): {type(asked).__name__} cannot be asked for its state, because a step "
                f"on tiny tensors raises {type(error).__name__}: {error}. Leave the optimizer out"
            ) from error
        states.update((key, size) for key, (size, _) in zip(keys, found, strict=True))
        counters += sum(constant for _, constant in found)
    return states, counters


def _optimizer(given: OptimizerLike, trained: dict[int, torch.Tensor]) -> tuple[torch.optim.Optimizer, dict[int, int]]:
    if isinstance(given, torch.optim.Optimizer):
        groups = {
            id(parameter): index
            for index, group in enumerate(given.param_groups)
            for parameter in group["params"]
            if id(parameter) in trained
        }
        if not groups:
            raise UsageError(
                f"memory_sources(optimizer=...): this {type(given).__name__} has none of the module's parameters that "
                "are trained (that of an engine has the engine's shards); pass its class instead"
            )
        return given, groups
    if isinstance(given, str):
        given = _by_name(given)
    # The probes keep the number of dimensions, because some optimizers accept only certain numbers.
    made = given(
        [nn.Parameter(torch.ones((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu")) for tensor in trained.values()]
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"memory_sources(optimizer=...) expects an optimizer, a class or callable that makes one, or a name; the "
            f"callable returned {type(made).__name__}"
        )
    return made, dict.fromkeys(trained, 0)


def _by_name(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise UsageError(
            f"memory_sources(optimizer={name!r}): expected the name of a class in torch.optim "
            f"({', '.join(sorted(cls.__name__ for cls in known.values()))}); for others pass the class, or "
            "lambda p: shardwise.optim.build(name, p, options, device=...)"
        )
    return known[name.lower()]


# -- activations -------------------------------------------------------------------------------------------------------


def _on_a_copy(module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None) -> Watch:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_copy(module, mode)
    watch = Watch(twin)
    with undisturbed(), mode:
        args, kwargs = fake_values((args, kwargs), mode)
        watch.run(twin, args, kwargs, loss)
    return watch


def _in_place(module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None) -> Watch:
    watch = Watch(module)
    used = [*module.parameters(), *module.buffers(), *tensors_in((args, kwargs))]
    devices = sorted({tensor.device.index for tensor in used if tensor.is_cuda})
    with undisturbed(devices), _same_buffers(module):
        watch.run(module, args, kwargs, loss)
    return watch


@contextlib.contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    with torch.no_grad():
        before = [
            (inner, name, buffer, None if buffer is None else buffer.detach().clone())
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
        ]
    try:
        yield
    finally:
        with torch.no_grad():
            for inner, name, buffer, values in before:
                inner._buffers[name] = buffer
                if buffer is not None and values is not None and not torch.equal(buffer, values):
                    buffer.copy_(values)
