"""Memory sources of a module's training: model, gradients, optimizer, activations.

The division follows Sohoni et al., "Low-memory neural network training: a technical report" (2019), with separate
gradients and optimizer. Activations are counted as the outputs of layers, by hooks, and exactly, as the memory that
autograd saves for the backward pass. Tests compare the two transformer formulas with both.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.compat import without_overrides
from shardwise.errors import UsageError
from shardwise.memory.dryrun import Answers, fake_copy, fake_optimizer, fake_values, undisturbed
from shardwise.memory.report import as_text, plain_table
from shardwise.trees import tensors_in
from shardwise.units import format_size

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
        table = plain_table("Memory of training, by source", ("", "bytes", " "), self.notes)
        for name, size in (
            ("model", self.model),
            ("buffers", self.buffers),
            ("gradients", self.gradient),
            ("optimizer", self.optimizer),
            ("activations: outputs of layers, and inputs", self.activation_outputs),
            ("activations: saved by autograd", self.activation_saved),
        ):
            table.add_row(name, "-" if size is None else f"{size:,}", format_size(size))
        table.add_section()
        table.add_row("total (with saved activations)", f"{self.total:,}", format_size(self.total), style="bold")
        modules = plain_table("By module", ("", "model", "gradients", "optimizer", "outputs", "saved"))
        for module in self.modules:
            if module.name and module.name.count(".") < depth:
                sums = self.under(module.name)
                sizes = (sums.model, sums.gradient, sums.optimizer, sums.outputs, sums.saved)
                modules.add_row(f"{module.name} ({module.kind})", *map(format_size, sizes))
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
    parameters = {id(parameter): parameter for _, parameter in module.named_parameters()}
    lazy = [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UsageError(
            f"memory_sources(): {len(lazy)} parameters have no shape yet ({lazy[0]}); run the module on a batch before"
        )
    states, counters = _optimizer_states({k: p for k, p in parameters.items() if p.requires_grad}, optimizer)
    notes = [] if optimizer is not None else ["No optimizer is given."]
    watch = None
    if args or kwargs:
        if dry_run is None:
            dry_run = any(p.is_meta for p in parameters.values()) or _waits_for_ranks(module)
            if dry_run:
                notes.append("Computed on fake tensors: the parameters have no values here, or belong to an engine.")
        watch = _watched(module, args, kwargs, loss, dry_run)
    else:
        notes.append("Activations are counted if inputs are given.")
    outputs, saved = (Counter[str](), Counter[str]()) if watch is None else (watch.outputs, watch.saved)
    modules = []
    for name, inner in module.named_modules():
        own = [q for p in inner._parameters.values() if (q := parameters.pop(id(p), None)) is not None]
        trained = [parameter for parameter in own if parameter.requires_grad]
        state = sum(states.get(id(parameter), 0) for parameter in trained)
        sizes = (_nbytes(own), _nbytes(trained), state, outputs[name], saved[name])
        modules.append(ModuleMemory(name, type(inner).__name__, *sizes))
    return MemorySources(
        model=sum(one.model for one in modules),
        buffers=_nbytes({id(buffer): buffer for buffer in module.buffers()}.values()),
        gradient=sum(one.gradient for one in modules),
        optimizer=sum(one.optimizer for one in modules),
        optimizer_counters=counters,
        inputs=watch.inputs if watch is not None else 0,
        activation_outputs=None if watch is None else watch.inputs + sum(outputs.values()),
        activation_saved=None if watch is None else sum(saved.values()),
        modules=tuple(modules),
        notes=tuple(notes),
    )


def transformer_model_bytes(layers: int, hidden: int, *, itemsize: int = 4) -> int:
    """Return the parameter bytes of a transformer's layers, 4 * layers * hidden * (13 + 12 * hidden) in fp32.

    A layer has query, key, value and output projections (4h^2 + 4h), a feed-forward network of four times the width
    (8h^2 + 5h), and two layer norms (4h). Embeddings and a final norm are excluded.

    >>> transformer_model_bytes(12, 768)
    340217856
    """
    return itemsize * layers * hidden * (13 + 12 * hidden)


def transformer_activation_bytes(layers: int, hidden: int, heads: int, batch: int, length: int) -> int:
    """Return the estimated saved activations of an fp32 transformer: n*b*l*h * (67 + 9*m*l / h) bytes.

    Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022, arXiv:2205.05198, section
    4.1), count 34*b*l*h + 5*b*m*l^2 bytes in each of n layers in 16 bits, including dropout masks of one byte a value
    (width h, m heads, b sequences of l tokens). In fp32 all but the masks double: 66*b*l*h + 9*b*m*l^2. The common form
    with 67 counts one of two masks as doubled. The formula holds for attention with materialized scores and dropout;
    fused attention does not save scores.

    >>> transformer_activation_bytes(12, 768, 12, 8, 1024)
    15929966592
    """
    return layers * batch * length * (67 * hidden + 9 * heads * length)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    with without_overrides():
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _waits_for_ranks(module: nn.Module) -> bool:
    """True if calling the module may be a collective, because it belongs to an engine."""
    return any(
        getattr(hook, "may_wait_for_ranks", False)
        for inner in module.modules()
        for hook in inner._forward_pre_hooks.values()
    )


# -- optimizer ---------------------------------------------------------------------------------------------------------


def _optimizer_states(trained: Mapping[int, torch.Tensor], given: OptimizerLike | None) -> tuple[dict[int, int], int]:
    """Return the bytes of each parameter's optimizer state after a step on fake tensors, and of all step counters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if given is None or not trained:
        return {}, 0
    with FakeTensorMode(allow_non_fake_inputs=True), Answers(), torch.enable_grad():
        fakes: dict[int, nn.Parameter] = {}
        for key, tensor in trained.items():
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            fakes[key] = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            fakes[key].grad = torch.empty_like(fakes[key])
        made = _optimizer_of(given, fakes)
        try:
            # The class's method, because a scheduler may have wrapped the instance's and would count the call.
            type(made).step(made)
        except Exception as error:  # a custom optimizer's step, or one that needs a closure
            raise UsageError(
                f"memory_sources(optimizer=...): the state of {type(made).__name__} is unknown, because a step on fake "
                f"tensors raises {type(error).__name__}: {error}. Leave the optimizer out"
            ) from error
    states, counters = {}, 0
    for key, fake in fakes.items():
        kept = [value for value in made.state.get(fake, {}).values() if isinstance(value, torch.Tensor)]
        states[key] = sum(value.untyped_storage().nbytes() for value in kept)
        # The averages of a 0-D parameter are 0-D, but no counters.
        counters += sum(value.untyped_storage().nbytes() for value in kept if fake.dim() and not value.dim())
    return states, counters


def _optimizer_of(given: OptimizerLike, fakes: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        groups = [
            {**group, "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
            for group in given.param_groups
        ]
        if not any(group["params"] for group in groups):
            raise UsageError(
                f"memory_sources(optimizer=...): this {type(given).__name__} has none of the module's parameters that "
                "are trained (that of an engine has the engine's shards); pass its class instead"
            )
        return fake_optimizer(given, groups)
    if isinstance(given, str):
        classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
        known = {kind.__name__.lower(): kind for kind in classes if torch.optim.Optimizer in kind.__mro__[1:]}
        if given.lower() not in known:
            raise UsageError(
                f"memory_sources(optimizer={given!r}): expected the name of a class in torch.optim "
                f"({', '.join(sorted(kind.__name__ for kind in known.values()))}); for others pass the class, or "
                "lambda p: shardwise.optim.build(name, p, options, device=...)"
            )
        given = known[given.lower()]
    made = given(list(fakes.values()))
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"memory_sources(optimizer=...) expects an optimizer, a class or callable that makes one, or a name; the "
            f"callable returned {type(made).__name__}"
        )
    return made


# -- activations -------------------------------------------------------------------------------------------------------


def _watched(module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None, dry_run: bool) -> _Watch:
    """Run a forward pass and count; on a fake copy of the module in a dry run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        if dry_run:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            module = fake_copy(module, mode)
            stack.enter_context(undisturbed())
            stack.enter_context(mode)
            args, kwargs = fake_values((args, kwargs), mode)
        else:
            used = [*module.parameters(), *module.buffers(), *tensors_in((args, kwargs))]
            stack.enter_context(undisturbed(sorted({tensor.device.index for tensor in used if tensor.is_cuda})))
            stack.enter_context(_copied_buffers(module))
        watch = _Watch(module)
        watch.run(module, args, kwargs, loss)
    return watch


@contextlib.contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Replace the buffers by copies inside the block."""
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    before = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    try:
        for buffers, originals in before:
            buffers.update({name: copies.get(id(buffer), buffer) for name, buffer in originals.items()})
        yield
    finally:
        for buffers, originals in before:
            buffers.clear()
            buffers.update(originals)


class _Watch:
    """Counts bytes of module outputs and of saved tensors in one forward pass, by module name."""

    def __init__(self, module: nn.Module) -> None:
        self.outputs: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()
        self.inputs = 0
        self._names = {inner: name for name, inner in module.named_modules()}
        self._running: list[nn.Module] = []
        self._calling: set[int] = set()  # depths of running modules that have called others
        self._kept: list[tuple[str, weakref.ref[_Kept]]] = []
        with without_overrides():
            tensors = (*module.parameters(), *module.buffers())
            self._permanent = {id(storage): storage for tensor in tensors for storage in _storages(tensor)}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None) -> None:
        """Call the module and count."""
        self.inputs = self._new_bytes((args, kwargs))
        with contextlib.ExitStack() as hooks:
            for inner in self._names:
                hooks.callback(inner.register_forward_pre_hook(self._enter, prepend=True).remove)
                hooks.callback(inner.register_forward_hook(self._leave, always_call=True).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor))
            result = module(*args, **kwargs)
            scalar = loss(result) if loss is not None else None
        counted = set(self._permanent)
        for name, reference in self._kept:
            kept = reference()  # None: its part of the graph has been freed
            for storage in () if kept is None else _storages(kept.tensor):
                if id(storage) not in counted:
                    counted.add(id(storage))
                    self.saved[name] += storage.nbytes()
        del result, scalar  # kept the graph alive until here

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._calling.add(len(self._running))
        self._running.append(module)
        self._calling.discard(len(self._running))

    def _leave(self, module: nn.Module, _: Any, result: Any) -> None:
        while self._running.pop() is not module:  # calls ended by an exception before their hooks
            pass
        if len(self._running) + 1 not in self._calling:
            self.outputs[self._names[module]] += self._new_bytes(result)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.append((self._names[self._running[-1]] if self._running else "", weakref.ref(kept)))
        return kept

    def _new_bytes(self, values: Any) -> int:
        size = 0
        for storage in (storage for tensor in tensors_in(values) for storage in _storages(tensor)):
            known = self._seen.get(id(storage))
            if id(storage) not in self._permanent and (known is None or known() is not storage):
                self._seen[id(storage)] = weakref.ref(storage)
                size += storage.nbytes()
        return size


class _Kept:
    """A tensor saved by autograd; lives as long as the graph node."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""Methods that return the dense parts of sparse tensors."""


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        return [storage for name in wrapper.__tensor_flatten__()[0] for storage in _storages(getattr(wrapper, name))]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout not in _PARTS:
        raise UsageError(f"memory_sources(): memory behind tensors of layout {tensor.layout} cannot be counted")
    return [getattr(tensor, name)().untyped_storage() for name in _PARTS[tensor.layout]]
