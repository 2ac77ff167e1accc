"""Model families: names of attention, MLP and expert layers, and the sharding of each block.

The tables contain names. Sizes determine fused queries, keys and values, fused gates, and the number of key heads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.tensor.group import Runs
from shardwise.parallel.tensor.heads import HEADS, Heads, fits, fitting, number, scaled
from shardwise.parallel.tensor.layers import ShardSpec, joined, runs_of
from shardwise.parallel.tensor.module_index import Inventory, Layer, under

SIZE = "tensor_parallel.autotp_size"

# Separate query, key and value projections, and the output projection.
APART: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense", "c_proj")),
    (("q", "k", "v"), ("o",)),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("query", "key", "value"), ("dense", "out_proj", "o_proj")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("wq", "wk", "wv"), ("wo",)),
)

# Fused query-key-value projections, and the output projection.
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("c_attn", ("c_proj",)),
    ("query_key_value", ("dense",)),
    ("qkv_proj", ("o_proj", "out_proj")),
    ("Wqkv", ("out_proj", "Wo")),
    ("W_pack", ("o_proj",)),
    ("qkv", ("proj",)),
)

# Latent attention of DeepSeek-V2 (2405.04434): query projection (one of two names), key-value projection by head,
# projection to the latent vector and the keys shared by all heads, output projection.
LATENT = ("q_proj", "q_b_proj"), "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"

# First projections, multiplied elementwise, and the last projection.
MLPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("w1", "w3"), "w2"),
    (("intermediate.dense",), "output.dense"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
)

OTHER_LAYOUTS = ("CodeGenAttention",)  # classes with a fused projection in an unsupported order: unsharded

# Attention classes with biases of all heads, and the arguments' names.
BIASES = {
    "BloomAttention": ("alibi",),
    "FalconAttention": ("alibi", "attention_mask"),
    "MptAttention": ("position_bias",),
}

_BIAS = "relative_attention_bias"
_NORM = re.compile(r"^(?:q|k|query|key)(?:_\w*)?norm$")
_OF_KEYS = re.compile(r"(?:^|[._])(?:k|key|keys|v|value|values)(?:[._]|$)|(?:^|_)ln_[kv]$")


# Module name -> tensor name -> dimension, and each rank's ranges.
Slices = dict[str, dict[str, tuple[int, tuple[Runs, ...]]]]


@dataclass
class Block:
    """Layers that are sharded together."""

    path: str
    cuts: dict[str, ShardSpec]  # sharding of each layer, by name
    row: str  # name of the row-parallel layer
    heads: Heads | None = None
    features: tuple[int, int] = (0, 0)  # of queries and of keys
    holders: tuple[str, ...] = ()  # names of modules with attributes for the number of heads
    summands: Sequence[str] = ()  # names of modules whose parameters have partial gradients
    # names of parameters sharded in their first dimension
    vectors: dict[str, tuple[Runs, ...]] = field(default_factory=dict)
    # unsharded tensors with a number for each head or feature; ranks use parts
    slices: Slices = field(default_factory=dict)


@dataclass
class _Inside:
    summands: list[str] = field(default_factory=list)  # modules that each rank applies to its own heads
    # Module -> tensors with a number for each head: dimension, and True for key heads.
    of_heads: dict[str, dict[str, tuple[int, bool]]] = field(default_factory=dict)

    def slices(self, heads: Heads) -> Slices:
        return {
            path: {name: (dim, heads.own_keys if keys else heads.own) for name, (dim, keys) in tensors.items()}
            for path, tensors in self.of_heads.items()
        }


class Finder:
    """Finds the blocks of a model that can be sharded.

    MLP features are sharded in multiples of `grain`. The model's own plan names `planned` layers and parameters.
    """

    def __init__(self, inventory: Inventory, size: int, grain: int, planned: Collection[str] = ()) -> None:
        self._inventory, self._size, self._grain, self._planned = inventory, size, grain, planned
        configs = [module.config for _, module in inventory.pretrained()]
        self._config = configs[0] if configs else None

    def blocks(self) -> Iterator[Block]:
        """Yield blocks; a layer is in at most one."""
        taken: set[str] = set()
        for path in self._inventory.modules:
            for found in (self._attention(path), self._mlp(path)):
                if found is not None and not taken & set(found.cuts):
                    taken |= set(found.cuts)
                    yield found

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(self, path: str) -> Block | None:
        return self._latent(path) or self._apart(path) or self._fused(path)

    def _apart(self, path: str) -> Block | None:
        for names, rows in APART:
            q, k, v = (self._linear(path, name) for name in names)
            row = next((found for name in rows if (found := self._linear(path, name)) is not None), None)
            if q is None or k is None or v is None or row is None:
                continue
            holders = self._holders(path, q)
            total = self._heads(holders, q)
            if total is None or q.outputs % total or row.inputs % total or k.outputs != v.outputs:
                continue
            width = number(self._modules(holders), ("head_dim", "key_value_proj_dim")) or q.outputs // total
            if k.outputs % width or total % (keys := k.outputs // width):
                continue
            if (inside := self._inside(path, [q, k, v, row], width, total, keys)) is None:
                continue
            heads = self._dealt(total, keys, row.path)
            by_key = scaled(heads.own_keys, width)
            cuts = {
                q.path: ShardSpec("column", scaled(heads.own, q.outputs // total)),
                k.path: ShardSpec("column", by_key),
                v.path: ShardSpec("column", by_key),
                row.path: ShardSpec("row", scaled(heads.own, row.inputs // total)),
            }
            vectors = self._by_head(path, heads)
            bias = f"{under(path)}{_BIAS}"
            if bias in self._inventory.layers and self._inventory.layers[bias].is_embedding:
                cuts[bias] = ShardSpec("width", heads.own)
            features = row.inputs, k.outputs
            slices = inside.slices(heads)
            return Block(path, cuts, row.path, heads, features, holders, inside.summands, vectors, slices)
        return None

    def _fused(self, path: str) -> Block | None:
        module = self._inventory.modules[path]
        if type(module).__name__ in OTHER_LAYOUTS:
            return None
        for name, rows in FUSED:
            fused = self._linear(path, name)
            row = next((found for other in rows if (found := self._linear(path, other)) is not None), None)
            if fused is None or row is None:
                continue
            holders = self._holders(path, fused)
            total = self._heads(holders, fused)
            if total is None or row.inputs % total:
                continue
            width = row.inputs // total
            separate = self._linear(path, "q_attn") if name == "c_attn" else None
            known = [fused, row, *([separate] if separate is not None else [])]
            units = fused.outputs // width
            keys = (units - total) // 2 if separate is None and units > total else total
            if (inside := self._inside(path, known, width, total, keys)) is None:
                continue
            if separate is not None:  # GPT-2 cross-attention: fused keys and values only
                heads = self._dealt(total, total, row.path)
                by_head = scaled(heads.own, width)
                cuts = {separate.path: ShardSpec("column", by_head), fused.path: _joined_cut(heads, [by_head, by_head])}
            else:
                ordered = self._order(fused, total, width, module)
                if ordered is None:
                    continue
                heads, cut = ordered
                cuts = {fused.path: cut}
            cuts[row.path] = ShardSpec("row", scaled(heads.own, width))
            features = row.inputs, heads.keys * width
            vectors, slices = self._by_head(path, heads), inside.slices(heads)
            return Block(path, cuts, row.path, heads, features, holders, inside.summands, vectors, slices)
        return None

    def _order(self, fused: Layer, total: int, width: int, module: nn.Module) -> tuple[Heads, ShardSpec] | None:
        """Return heads and sharding of a fused projection, whose order follows from sizes and class."""
        units, rest = divmod(fused.outputs, width)
        own_order = fused.path.endswith("query_key_value") or isinstance(getattr(module, "multi_query", None), bool)
        grouped = bool(getattr(module, "new_decoder_architecture", False))
        several = number([module], ("num_multi_query_groups_per_partition",)) is not None
        if rest or units <= total or (units - total) % 2:
            return None
        keys = (units - total) // 2
        if total % keys:
            return None
        heads = self._dealt(total, keys, fused.path)
        if grouped and keys < total and not heads.shares:
            return heads, ShardSpec("column", scaled(heads.own_keys, (total // keys + 2) * width))
        if grouped and keys < total:  # Falcon: queries, key and value of each group
            group = total // keys
            picked = [
                tuple(
                    run
                    for (key, _), (first, end) in zip(own_keys, own, strict=True)
                    for run in (
                        (first + 2 * key, end + 2 * key),
                        (key * (group + 2) + group, (key + 1) * (group + 2)),
                    )
                )
                for own, own_keys in zip(heads.own, heads.own_keys, strict=True)
            ]
            return heads, ShardSpec("picked", scaled(picked, width))
        if own_order and keys == total and not several:  # BLOOM, GPT-NeoX: query, key and value of each head
            return heads, ShardSpec("column", scaled(heads.own, 3 * width))
        by_key = scaled(heads.own_keys, width)
        return heads, _joined_cut(heads, [scaled(heads.own, width), by_key, by_key])

    def _latent(self, path: str) -> Block | None:
        queries, key_values, maker, outcome = LATENT
        q = next((found for name in queries if (found := self._linear(path, name)) is not None), None)
        kv, made, row = (self._linear(path, name) for name in (key_values, maker, outcome))
        if q is None or kv is None or made is None or row is None:
            return None
        holders = self._holders(path, q)
        total = self._heads(holders, q)
        known = [q, kv, made, row, *filter(None, [self._linear(path, "q_a_proj")])]
        if total is None or any(size % total for size in (q.outputs, kv.outputs, row.inputs)):
            return None
        if self._inside(path, known, 0, total, total) is None:
            return None
        heads = self._dealt(total, total, row.path)
        cuts = {
            q.path: ShardSpec("column", scaled(heads.own, q.outputs // total)),
            made.path: ShardSpec("latent", (((kv.inputs, made.outputs),),) * self._size),
            kv.path: ShardSpec("column", scaled(heads.own, kv.outputs // total)),
            row.path: ShardSpec("row", scaled(heads.own, row.inputs // total)),
        }
        return Block(path, cuts, row.path, heads, (row.inputs, kv.outputs), holders)

    def _inside(self, path: str, known: Sequence[Layer], width: int, total: int, keys: int) -> _Inside | None:
        """Return other parameters of attention; None if one cannot be sharded safely. `width` 0: all unsharded."""
        names = {layer.path for layer in known}
        module, found = self._inventory.modules[path], _Inside()
        for name, child in module.named_children():
            inner = f"{under(path)}{name}"
            other = self._linear(path, name)
            if other is not None and "norm" in type(child).__name__.lower():
                other = None  # a norm for each head
            if other is not None and other.path not in names and inner not in self._planned:
                return None
            weight = child._parameters.get("weight")
            if _NORM.match(name) and weight is not None and width and weight.dim() == 1 and weight.numel() != width:
                return None  # a norm over all heads
        if not width:
            return found
        inside = self._inventory.modules[known[0].path.rpartition(".")[0]]
        for child in inside.children():
            sizes = [p.numel() for p in child._parameters.values() if p is not None and p.dim() == 1]
            if "norm" in type(child).__name__.lower() and total > 1 and set(sizes) & {total * width, keys * width}:
                return None  # a norm over all heads of the output
        for inner, child in self._within(path):
            if inner in names or any(inner.startswith(f"{one}.") for one in names) or inner in self._planned:
                continue
            normalizes = "norm" in type(child).__name__.lower()
            if (self._inventory.linear(inner) is not None and not normalizes) or inner.endswith(_BIAS):
                continue
            if isinstance(child, nn.ModuleList) and len(child) in (total, keys):
                self._note_heads(found, inner, 0, len(child), total, keys)
            self._sort(found, inner, child, width, total, keys, outermost=inner == path)
        direct = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None
            and f"{under(path)}{name}" not in self._planned
            and name not in found.of_heads.get(path, {})
            and parameter.numel() not in (1, width)
        ]
        return None if direct else found

    def _within(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        start = under(path)
        for name, module in self._inventory.modules.items():
            if name == path or name.startswith(start):
                yield name, module

    def _sort(
        self, found: _Inside, path: str, module: nn.Module, width: int, total: int, keys: int, *, outermost: bool
    ) -> None:
        """Record tensors that ranks apply to their own heads; uncertain cases are compared at run time."""
        own: dict[str, Any] = {name: one for name, one in module._parameters.items() if one is not None}
        for name, parameter in own.items():
            if f"{under(path)}{name}" in self._planned:
                continue
            of_width = not outermost and parameter.shape[-1:] == (width,) and parameter.dim() < 3
            if of_width and (parameter.dim() == 1 or parameter.shape[0] not in (total, keys)):
                found.summands.append(path)
                continue
            dims = [dim for dim, size in enumerate(parameter.shape) if size in (total, keys) and size > 1]
            if dims:
                self._note_heads(found, f"{under(path)}{name}", dims[0], parameter.shape[dims[0]], total, keys)
        if outermost:
            plain = {name: one for name, one in vars(module).items() if isinstance(one, torch.Tensor)}
            for name, buffer in ({**module._buffers} | plain).items():
                if buffer is None or not buffer.is_floating_point() or name.startswith("inv_freq"):
                    continue
                dims = [dim for dim, size in enumerate(buffer.shape) if size == buffer.numel() > 1]
                if dims and buffer.numel() in (total, keys):
                    self._note_heads(found, f"{under(path)}{name}", dims[0], buffer.numel(), total, keys)

    def _note_heads(self, found: _Inside, path: str, dim: int, size: int, total: int, keys: int) -> None:
        outer, _, name = path.rpartition(".")
        of_keys = size == keys and (size != total or (keys != total and bool(_OF_KEYS.search(path))))
        found.of_heads.setdefault(outer, {})[name] = dim, of_keys

    def _by_head(self, path: str, heads: Heads) -> dict[str, tuple[Runs, ...]]:
        found = {}
        for name, parameter in self._inventory.modules[path]._parameters.items():
            named = f"{under(path)}{name}" in self._planned
            if named and parameter is not None and len(parameter) % heads.total == 0:
                found[f"{under(path)}{name}"] = scaled(heads.own, len(parameter) // heads.total)
        return found

    def _holders(self, path: str, layer: Layer) -> tuple[str, ...]:
        parent = layer.path.rpartition(".")[0]
        return (path,) if parent == path else (parent, path)

    def _modules(self, holders: Sequence[str]) -> list[nn.Module]:
        return [self._inventory.modules[name] for name in holders]

    def _heads(self, holders: Sequence[str], layer: Layer) -> int | None:
        modules = self._modules(holders)
        configs = [found for module in modules if (found := getattr(module, "config", None)) is not None]
        return number([*modules, *configs, self._config], HEADS)

    def _dealt(self, total: int, keys: int, path: str) -> Heads:
        if not fits(total, keys, self._size):
            raise ConfigError(
                f"{SIZE}: {self._size} ranks cannot divide the {total} heads of {path}"
                + (f", which has {keys} heads of keys" if keys != total else "")
                + f"; numbers that would do: {', '.join(map(str, fitting(total, keys))) or 'none'}. Or leave its "
                'layers whole: a rule with "partition_type": "skip" in tensor_parallel.partition_config.layer_specs'
            )
        return Heads.dealt(total, keys, self._size)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _mlp(self, path: str) -> Block | None:
        for names, last in MLPS:
            columns = [self._linear(path, name) for name in names]
            row = self._linear(path, last)
            found = [layer for layer in columns if layer is not None]
            if row is None or len(found) < len(columns):
                continue
            inner = row.inputs
            halves = len(found) == 1 and found[0].outputs == 2 * inner
            if not halves and any(layer.outputs != inner for layer in found):
                continue
            if found[0].inputs != inner and self._normed(path, inner):
                continue
            runs = even(inner, self._size, row.path, self._grain)
            cut = ShardSpec("column", joined([(inner, runs)] * 2) if halves else runs)
            cuts = {layer.path: cut for layer in found} | {row.path: ShardSpec("row", runs)}
            return Block(path, cuts, row.path, slices=self._of_features(found[0].path, cuts, inner, runs))
        return None

    def _of_features(self, column: str, cuts: Collection[str], inner: int, runs: tuple[Runs, ...]) -> Slices:
        outer = column.rpartition(".")[0]
        if any(layer.path not in cuts for layer in self._inventory.below(outer)):
            return {}
        found: Slices = {}
        for path, module in self._within(outer):
            own: dict[str, Any] = {} if path in cuts else {**module._parameters}
            for name, parameter in own.items():
                dims = [] if parameter is None else [dim for dim, size in enumerate(parameter.shape) if size == inner]
                if len(dims) == 1 and parameter.numel() == inner and f"{under(path)}{name}" not in self._planned:
                    found.setdefault(path, {})[name] = dims[0], runs
        return found

    def _normed(self, path: str, features: int) -> bool:
        for child in self._inventory.modules[path].children():
            named = "norm" in type(child).__name__.lower()
            own = [p for name, p in child._parameters.items() if p is not None and (named or name == "weight")]
            if any(parameter.dim() == 1 and len(parameter) == features for parameter in own):
                return True
        return False

    def _linear(self, path: str, name: str) -> Layer | None:
        return self._inventory.linear(f"{under(path)}{name}")


def _joined_cut(heads: Heads, parts: Sequence[tuple[Runs, ...]]) -> ShardSpec:
    """Return the sharding of a fused projection; its weight is unsharded where ranks share key heads."""
    sizes = [max(end for own in runs for _, end in own) for runs in parts]
    runs = joined(list(zip(sizes, parts, strict=True)))
    return ShardSpec("picked" if heads.shares else "column", runs)


def even(total: int, size: int, path: str, grain: int = 1) -> tuple[Runs, ...]:
    """Return ranges as equal as possible, in multiples of `grain`; the last may be smaller.

    Raises a ConfigError that names the layer, if there are fewer grains than ranks.
    """
    grains = -(-total // grain)
    if grains < size:
        raise ConfigError(
            f"{SIZE}: {size} ranks cannot divide the {total} features of {path}"
            + (f" in units of {grain} (tensor_parallel.tp.tp_grain_size)" if grain > 1 else "")
            + f"; numbers up to {grains} would do. Or leave the layer whole: a rule with "
            '"partition_type": "skip" in tensor_parallel.partition_config.layer_specs'
        )
    runs = scaled(runs_of(grains, size), grain)
    return tuple(tuple((first, min(end, total)) for first, end in own) for own in runs)


@dataclass(frozen=True)
class Stacked:
    """Experts with weights stacked in 3-D tensors."""

    inner: int  # features between the projections
    # first projections and biases: dimension of the inner features, and ranges
    first: dict[str, tuple[int, tuple[Runs, ...]]]
    last: tuple[str, int]  # last projection, and its dimension of inner features
    last_bias: str | None  # its biases, added once
    runs: tuple[Runs, ...]  # ranges of the inner features


def stacked(module: nn.Module, path: str, size: int, grain: int) -> Stacked | None:
    """Return the sharding of a module's stacked experts, or None; routing stays unsharded."""
    own: dict[str, Any] = {name: value for name, value in module._parameters.items() if value is not None}
    down = own.get("down_proj")
    firsts: list[str] = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if name in own]
    if down is None or down.dim() != 3 or not firsts or any(own[name].dim() != 3 for name in firsts):
        return None
    known = {*firsts, "down_proj", *(f"{name}_bias" for name in (*firsts, "down_proj"))}
    if set(own) - known or getattr(module, "has_post_expert_norm", False):
        return None
    first = own[firsts[0]]
    double = 2 if firsts[0] == "gate_up_proj" else 1
    turned = first.shape[1] != double * down.shape[2] or first.shape[2] != down.shape[1]
    if getattr(module, "is_transposed", turned):
        dim, last, inner = 2, 1, down.shape[1]
    else:
        dim, last, inner = 1, 2, down.shape[2]
    if first.shape[dim] != double * inner:
        return None
    alternating = double == 2 and not getattr(module, "is_concatenated", True)
    runs = even(inner, size, path, grain)
    wide = runs if double == 1 else scaled(runs, 2) if alternating else joined([(inner, runs)] * 2)
    cuts = {name: (dim, wide) for name in firsts}
    cuts |= {f"{name}_bias": (1, wide) for name in firsts if f"{name}_bias" in own}
    return Stacked(inner, cuts, ("down_proj", last), "down_proj_bias" if "down_proj_bias" in own else None, runs)
