"""Contents of one rank's file: its ranges of every tensor (`owned_ranges`), and its part of the manifest.

Replicated values are split: files are equally large and no byte is written twice. Ranks may have different modules; the
first rank with a replicated value writes it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.boxes import Region, ranges
from shardwise.checkpoint import nested_json
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Slice, StoredTensor, name_of
from shardwise.checkpoint.protocols import CheckpointedModel, Fetch, Run, in_place
from shardwise.checkpoint.safetensors_reader import bytes_of
from shardwise.errors import CheckpointError
from shardwise.registry import LogicalTensor


@dataclass
class TrainingState:
    """State except tensors of the model and the optimizer, as plain Python values: `client` is the user's (rank 0's is
    saved), `rank` this rank's random number generators, `loader` the position in the data (rank 0's is saved),
    `counters` steps and samples.
    """

    client: Any = field(default_factory=dict)
    rank: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    scaler: Any = None
    loader: Any = None
    counters: dict[str, int] = field(default_factory=dict)


class RankSavePlan:
    """One rank's part of a checkpoint: tensors for its file, and JSON for the manifest.

    `fetch` makes offloaded tensors readable, and with `check_finite` records trained parameters and optimizer states
    with infinite or NaN values in `not_finite`. Buffers are not checked, because masks are infinite. `runs` are the
    names of tensors that are ranges of values and of optimizer states, where they are stepped. `inventories` are the
    names of all ranks' replicated state, and `own` the `own_buffers`, for `add_replicated`.
    """

    def __init__(self, file: str, fetch: Fetch = in_place, *, check_finite: bool = False) -> None:
        self.file = file
        self.not_finite: list[str] = []
        self._fetch = fetch
        self._check_finite = check_finite
        self.runs: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.stored: list[StoredTensor] = []
        self.values: dict[str, dict[str, Any]] = {}
        self.trees: dict[str, Any] = {}
        self.order: list[str] = []
        self.excluded: list[str] = []
        self.inventories: Sequence[dict[str, Any]] = ()
        self.own: dict[str, int | None] = {}
        self._trained: dict[str, str] = {}  # names for messages, by key

    def to_json(self) -> dict[str, Any]:
        """Return the part for rank 0."""
        stored = [tensor.to_json() for tensor in self.stored]
        names = {"order": self.order, "excluded": self.excluded}
        return {"stored": stored, "values": self.values, "trees": self.trees, **names}

    def put(self, key: str, tensor: torch.Tensor) -> str:
        """Add a tensor to the file under a unique key; return the key."""
        unique, count = key, 1
        while unique in self.tensors:
            count += 1
            unique = f"{key}#{count}"
        self.tensors[unique] = tensor
        return unique

    def store_tensor(self, path: str, tensor: torch.Tensor) -> dict[str, str]:
        """Store a tensor of a tree (`shardwise.checkpoint.nested_json.StoreTensor`)."""
        return {"file": self.file, "key": self.put(path, tensor.contiguous())}

    def add_runs(self, tensor: StoredTensor, runs: list[Run], box: Region | None = None) -> None:
        """Store ranges of a logical tensor, or of its box."""
        keys = [self._put(tensor, f"[{start}:{stop}]", view) for start, stop, view in runs]
        self.runs.update(keys)
        slices = (Slice(self.file, key, *run[:2], box) for key, run in zip(keys, runs, strict=True))
        self.stored.append(StoredTensor(**{**vars(tensor), "slices": tuple(slices)}))

    def add_unsharded(self, tensor: StoredTensor, values: torch.Tensor) -> None:
        """Store an unsharded logical tensor, in its own shape."""
        key = self._put(tensor, "" if tensor.rank is None else f"@{tensor.rank}", values.detach().contiguous())
        self.stored.append(replace(tensor, slices=(Slice(self.file, key, 0, tensor.numel),)))

    def _put(self, tensor: StoredTensor, part: str, values: torch.Tensor) -> str:
        key = self.put(f"{tensor.kind}/{tensor.name}{part}", values)
        if (tensor.trainable or tensor.kind.startswith(OPTIMIZER)) and values.is_floating_point() and values.numel():
            self._trained[key] = f"{tensor.kind} {tensor.name}"
        return key

    def fetch(self, tensors: Sequence[tuple[str, torch.Tensor]], use: Callable[[Sequence[str]], None]) -> None:
        """Fetch and use tensors, some at a time; values are checked then, because another fetch is slow."""

        def look_and_use(keys: Sequence[str]) -> None:
            self.not_finite += self.names_not_finite({key: self.tensors[key] for key in keys})
            use(keys)

        self._fetch(tensors, look_and_use if self._check_finite else use)

    def names_not_finite(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of trained parameters and optimizer states with infinite or NaN values, of some tensors of
        this part, or copies, by key.
        """
        found = []
        watched = [key for key in tensors if key in self._trained]
        for _, run in itertools.groupby(watched, key=lambda key: tensors[key].device):
            here = list(run)
            norms = torch._foreach_norm([tensors[key].detach() for key in here])
            finite = torch.isfinite(torch.stack([norm.double() for norm in norms])).tolist()
            # A norm may overflow where no value does.
            found += [
                self._trained[key]
                for key, fine in zip(here, finite, strict=True)
                if not fine and not bool(torch.isfinite(tensors[key]).all())
            ]
        return found


def collect(
    model: CheckpointedModel, file: str, state: TrainingState, excluded: frozenset[int], *, check_finite: bool = False
) -> RankSavePlan:
    """Return this rank's part, of views of live memory, without the parameters `excluded` by index. `check_finite`
    looks for infinite or NaN values in fetched tensors. Raises CheckpointError with the name of a value that cannot be
    saved.
    """
    part = RankSavePlan(file, model.fetch, check_finite=check_finite)
    part.order = [tensor.name for tensor in model.registry]
    values, ranges = model.value_runs(), model.owned_ranges()
    for tensor in model.registry:
        box = model.box_of(tensor)
        if tensor.index in excluded:
            part.excluded.append(tensor.name)
            continue
        with model.materialized(tensor.index):
            own = ranges.get(tensor.index, [])
            runs = within(values.get(tensor.index, []), own)
            if runs:
                part.add_runs(_described(tensor, runs[0][2].dtype), runs, box)
            elif 0 in tensor.global_shape:
                part.add_runs(_described(tensor, tensor.dtype), [])
            if own and model.update is not None:
                _add_optimizer_state(part, model, tensor, own)
    part.trees["rank"] = nested_json.encode(state.rank, "state of the rank", part.store_tensor)
    if model.comm.rank == 0:
        _add_common(part, model, state)
    return part


def _described(tensor: LogicalTensor, dtype: torch.dtype) -> StoredTensor:
    facts = tensor.aliases, tensor.trainable, tensor.group, name_of(tensor.dtype)
    return StoredTensor(tensor.name, PARAMETER, tensor.global_shape, name_of(dtype), (), *facts)


def within(runs: list[Run], ranges: list[tuple[int, int]]) -> list[Run]:
    """Return the intersection of runs with ranges."""
    found = []
    for start, stop, view in runs:
        for low, high in ranges:
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((first, last, view[first - start : last - start]))
    return found


def _add_optimizer_state(
    part: RankSavePlan, model: CheckpointedModel, tensor: LogicalTensor, own: list[tuple[int, int]]
) -> None:
    assert model.update is not None
    box = model.box_of(tensor)
    # State that cannot be split is saved by the rank with the parameter's first element.
    first = own[0][0] == 0 and all(some[0][0] == 0 for some in ranges(box or ()))
    for key, value in model.update.state(tensor.index).items():
        kind = OPTIMIZER + key
        number = isinstance(value, torch.Tensor) and value.dim() == 0
        runs = [] if number else model.update.state_pieces(tensor.index, key)
        if runs:
            described = StoredTensor(tensor.name, kind, tensor.global_shape, name_of(value.dtype), ())
            part.add_runs(described, within(runs, own), box)
        elif isinstance(value, torch.Tensor) and not number:
            if box is not None:
                raise CheckpointError(
                    f"optimizer state {key!r} of {tensor.name!r}: a tensor of shape {list(value.shape)} that belongs "
                    f"to the box {box} of {list(tensor.global_shape)}, which no other layout could load; use an "
                    "optimizer whose state has one value per element"
                )
            if first:
                part.add_unsharded(StoredTensor(tensor.name, kind, tuple(value.shape), name_of(value.dtype), ()), value)
        elif first:
            path = f"optimizer state {key!r} of {tensor.name!r}"
            part.values.setdefault(tensor.name, {})[key] = nested_json.encode(value, path, part.store_tensor)


def _add_common(part: RankSavePlan, model: CheckpointedModel, state: TrainingState) -> None:
    trees = part.trees
    trees["client"] = nested_json.encode(state.client, "client_state", part.store_tensor)
    trees["scheduler"] = nested_json.encode(state.scheduler, "state of the learning-rate schedule", part.store_tensor)
    trees["counters"] = state.counters
    trees["scaler"] = nested_json.encode(state.scaler, "state of the loss scaler", part.store_tensor)
    trees["loader"] = nested_json.encode(state.loader, "position in the training data", part.store_tensor)


def local_inventory(model: CheckpointedModel) -> dict[str, Any]:
    """Return the names of this rank's replicated state: buffers, extra state, parameter groups with their settings."""
    return {
        "buffers": [name for name, _ in buffers(model.module)],
        "extra": [name for name, _ in extra_states(model.module)],
        "groups": [] if model.optimizer is None else _groups(model, model.optimizer),
    }


def first_holders(inventories: Sequence[dict[str, Any]], kind: str) -> dict[str, int]:
    """Return the first rank of each name of one kind of replicated state."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for rank, inventory in enumerate(inventories):
        if id(inventory) not in seen:  # equal ones are one object
            seen.add(id(inventory))
            for name in inventory[kind]:
                found.setdefault(name, rank)
    return found


def own_buffers(model: CheckpointedModel, inventories: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """Return the buffers that this rank saves: those of which it is the first holder (None), and those with other
    values than the first holder's (this rank). A collective: each rank sends 8 bytes for each name of any rank.
    """
    rank, first = model.comm.rank, first_holders(inventories, "buffers")
    here = {name: _digest(buffer) if model.comm.sends else (0, 0) for name, buffer in buffers(model.module)}
    sent = [float(part) for name in first for part in (here[name] if first[name] == rank else (0, 0))]
    sums = torch.tensor(sent + [0.0] * (-len(sent) % model.comm.world), dtype=torch.float32, device=model.device)
    if sent:
        model.comm.sum_large(sums, "checkpoint").wait()
    numbers = sums.tolist()
    theirs = {name: (int(numbers[2 * n]), int(numbers[2 * n + 1])) for n, name in enumerate(first)}
    found: dict[str, int | None] = dict.fromkeys(name for name in here if first[name] == rank)
    found.update((name, rank) for name, digest in here.items() if first[name] != rank and theirs[name] != digest)
    return found


def _groups(model: CheckpointedModel, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Return for each parameter group its name, its plain settings, and whether it has parameters."""
    used = {tensor.group for tensor in model.registry}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        plain = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
        found.append([group.get("name"), repr(sorted(plain.items())), number in used])
    return found


def _joined_groups(inventories: Sequence[dict[str, Any]], rank: int) -> tuple[list[int | None], list[int]]:
    """Join the parameter groups of ranks, by name if all that have parameters have a name of their own.

    Returns:
        (number of each of this rank's groups in the checkpoint, this rank's groups that it writes).

    Raises CheckpointError if groups with parameters on several ranks have other settings.
    """
    ranks = [entry["groups"] for entry in inventories]
    distinct = {id(groups): groups for groups in ranks}.values()
    named = all(are_named([(name, used) for name, _, used in groups]) for groups in distinct)
    known: dict[str | int, int] = {}
    settings: dict[str | int, tuple[int, str]] = {}
    numbers: list[int | None] = []
    writes: list[int] = []
    for other, groups in enumerate(ranks):
        for number, (name, plain, used) in enumerate(groups):
            key = (name if isinstance(name, str) else None) if named else number
            if key is None:
                numbers += [None] if other == rank else []
                continue
            if used and settings.setdefault(key, (other, plain))[1] != plain:
                first, theirs = settings[key]
                raise CheckpointError(
                    f"parameter group {key!r} has the settings {theirs:.300} on rank {first} and {plain:.300} on rank "
                    f"{other}. If ranks have different groups, give each group a name of its own: "
                    '{"name": ..., "params": ...}'
                )
            if key not in known and other == rank:
                writes.append(number)
            known.setdefault(key, len(known))
            numbers += [known[key]] if other == rank else []
    return numbers, writes


def are_named(groups: Iterable[tuple[Any, bool]]) -> bool:
    """Return True if all groups (name, has parameters) of a rank that have parameters have names of their own."""
    names = [name for name, used in groups if used]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def collected(
    model: CheckpointedModel,
    file: str,
    state: Callable[[], TrainingState],
    excluded: frozenset[int],
    check_finite: bool,
    what: str,
) -> RankSavePlan:
    """Collect this rank's part, to which `add_replicated` adds this rank's replicated state. A collective."""
    model.share_changes()
    with collective_step(model.comm, what) as done:
        part = collect(model, file, state(), excluded, check_finite=check_finite)
        done.local = local_inventory(model)
    part.inventories, part.own = done.gathered, own_buffers(model, done.gathered)
    return part


def add_replicated(part: RankSavePlan, model: CheckpointedModel) -> None:
    """Add replicated state: the first rank that has it writes it, and each rank its `own_buffers`."""
    rank, names = model.comm.rank, buffer_names(model.module)
    for name, buffer in buffers(model.module):
        if name in part.own:
            shape, dtype = tuple(buffer.shape), name_of(buffer.dtype)
            also = tuple(names[id(buffer)][1:])
            part.add_unsharded(StoredTensor(name, BUFFER, shape, dtype, (), also, rank=part.own[name]), buffer)
    first = first_holders(part.inventories, "extra")
    part.trees["extra"] = {
        name: nested_json.encode(module.get_extra_state(), f"extra state of module {name!r}", part.store_tensor)
        for name, module in extra_states(model.module)
        if first[name] == rank
    }
    groups = [] if model.optimizer is None else model.optimizer.param_groups
    numbers, writes = _joined_groups(part.inventories, rank)
    part.stored = [
        tensor if tensor.group is None else replace(tensor, group=numbers[tensor.group]) for tensor in part.stored
    ]
    part.trees["groups"] = [
        nested_json.encode(
            {name: value for name, value in groups[number].items() if name != "params"},
            f"optimizer.param_groups[{number}]",
            part.store_tensor,
        )
        for number in writes
    ]


def _digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Return 48 bits of a tensor's digest as two numbers that float32 represents exactly."""
    digest = hashlib.blake2b(bytes_of(tensor.detach().cpu().contiguous()), digest_size=6).digest()
    return int.from_bytes(digest[:3], "little"), int.from_bytes(digest[3:], "little")


def all_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of a module under every name of its state dict."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, buffer in child._buffers.items():
            if buffer is not None and key not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def buffer_names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each persistent buffer, by its `id`."""
    found: dict[int, list[str]] = {}
    for name, buffer in all_buffers(module):
        found.setdefault(id(buffer), []).append(name)
    return found


def buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the persistent buffers of a module by name; a shared buffer once."""
    every = dict(all_buffers(module))
    return [(names[0], every[names[0]]) for names in buffer_names(module).values()]


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that define `get_extra_state`, by name."""
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child
