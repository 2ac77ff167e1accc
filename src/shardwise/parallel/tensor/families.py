"""Attention, MLPs and experts as families of models call their layers, and how each such block is divided.

The tables say what the layers are called; sizes say the rest: whether a projection has queries, keys and values in one,
whether an MLP has its gate and its other half in one, how many heads of keys there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.tensor.group import Runs
from shardwise.parallel.tensor.heads import HEADS, Heads, fits, fitting, number, scaled
from shardwise.parallel.tensor.inventory import Inventory, Layer, under
from shardwise.parallel.tensor.layers import Cut, joined, runs_of

SIZE = "tensor_parallel.autotp_size"

APART: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense", "c_proj")),
    (("q", "k", "v"), ("o",)),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("query", "key", "value"), ("dense", "out_proj", "o_proj")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("wq", "wk", "wv"), ("wo",)),
)
"""Queries, keys and values, and what their outcome passes."""

FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("c_attn", ("c_proj",)),
    ("query_key_value", ("dense",)),
    ("qkv_proj", ("o_proj", "out_proj")),
    ("Wqkv", ("out_proj", "Wo")),
    ("W_pack", ("o_proj",)),
    ("qkv", ("proj",)),
)
"""All three in one."""

LATENT = ("q_proj", "q_b_proj"), "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"
"""Attention through a latent vector, DeepSeek-V2 (2405.04434): queries by one of two names, keys and values by head,
what makes the latent vector and the part of the keys that all heads share, outcome."""

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
"""Layers whose outcomes meet element by element, and what that passes."""

OTHER_LAYOUTS = ("CodeGenAttention",)
"""Classes with a fused projection in an order of their own, which stays whole."""

BIASES = {
    "BloomAttention": ("alibi",),
    "FalconAttention": ("alibi", "attention_mask"),
    "MptAttention": ("position_bias",),
}
"""Classes of attention that get biases of all heads, and the arguments' names."""

_NORM = re.compile(r"^(?:q|k|query|key)(?:_\w*)?norm$")


@dataclass
class Block:
    """Layers that are divided together.

    Attributes:
        path: of the module that they are in.
        cuts: how each is divided, by its name.
        heads: of attention.
        features: of its queries and of its keys.
        holders: names of modules whose attributes say how many heads there are.
        summands: names of modules with parameters of which each rank has a summand of the gradient.
        vectors: names of parameters that are divided in their first dimension.
        row: name of the layer that puts parts together.
    """

    path: str
    cuts: dict[str, Cut]
    row: str
    heads: Heads | None = None
    features: tuple[int, int] = (0, 0)
    holders: tuple[str, ...] = ()
    summands: tuple[str, ...] = ()
    vectors: dict[str, tuple[Runs, ...]] = field(default_factory=dict)


class Finder:
    """Finds the blocks of a model.

    Args:
        inventory: of the model.
        size: ranks.
        grain: sizes of divided dimensions of MLPs are multiples of this.
        planned: names of layers and parameters that the model's own plan divides.
    """

    def __init__(self, inventory: Inventory, size: int, grain: int, planned: Collection[str] = ()) -> None:
        self._inventory, self._size, self._grain, self._planned = inventory, size, grain, planned
        configs = [module.config for _, module in inventory.pretrained()]
        self._config = configs[0] if configs else None

    def blocks(self) -> Iterator[Block]:
        """Yield them; a layer is in one block at most."""
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
            if (inside := self._inside(path, [q, k, v, row], width)) is None:
                continue
            heads = self._dealt(total, keys, row.path)
            by_key = scaled(heads.own_keys, width)
            cuts = {
                q.path: Cut("column", scaled(heads.own, q.outputs // total)),
                k.path: Cut("column", by_key),
                v.path: Cut("column", by_key),
                row.path: Cut("row", scaled(heads.own, row.inputs // total)),
            }
            vectors = self._by_head(path, heads)
            bias = f"{under(path)}relative_attention_bias"
            if bias in self._inventory.layers and self._inventory.layers[bias].is_embedding:
                cuts[bias] = Cut("width", heads.own)
            features = row.inputs, k.outputs
            return Block(path, cuts, row.path, heads, features, holders, inside, vectors)
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
            if (inside := self._inside(path, known, width)) is None:
                continue
            if separate is not None:  # GPT-2: of another sequence come keys and values only
                heads = self._dealt(total, total, row.path)
                by_head = scaled(heads.own, width)
                cuts = {separate.path: Cut("column", by_head), fused.path: _joined_cut(heads, [by_head, by_head])}
            else:
                ordered = self._order(fused, total, width, module)
                if ordered is None:
                    continue
                heads, cut = ordered
                cuts = {fused.path: cut}
            cuts[row.path] = Cut("row", scaled(heads.own, width))
            features = row.inputs, heads.keys * width
            return Block(path, cuts, row.path, heads, features, holders, inside, self._by_head(path, heads))
        return None

    def _order(self, fused: Layer, total: int, width: int, module: nn.Module) -> tuple[Heads, Cut] | None:
        """Return heads and cut of a projection with queries, keys and values, whose order its sizes and class tell."""
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
            return heads, Cut("column", scaled(heads.own_keys, (total // keys + 2) * width))
        if grouped and keys < total:  # Falcon: of each group its queries, key and value
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
            return heads, Cut("picked", scaled(picked, width))
        if own_order and keys == total and not several:  # BLOOM, GPT-NeoX: of each head its query, key and value
            return heads, Cut("column", scaled(heads.own, 3 * width))
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
        if self._inside(path, known, 0) is None:
            return None
        heads = self._dealt(total, total, row.path)
        cuts = {
            q.path: Cut("column", scaled(heads.own, q.outputs // total)),
            made.path: Cut("latent", (((kv.inputs, made.outputs),),) * self._size),
            kv.path: Cut("column", scaled(heads.own, kv.outputs // total)),
            row.path: Cut("row", scaled(heads.own, row.inputs // total)),
        }
        return Block(path, cuts, row.path, heads, (row.inputs, kv.outputs), holders)

    def _inside(self, path: str, known: Sequence[Layer], width: int) -> tuple[str, ...] | None:
        """Return the norms of heads that are inside of attention; None if it has what is not known to be divisible."""
        names = {layer.path for layer in known}
        norms = []
        for name, child in self._inventory.modules[path].named_children():
            inner = f"{under(path)}{name}"
            other = self._linear(path, name)
            if other is not None and other.path not in names and inner not in self._planned:
                return None
            weight = child._parameters.get("weight")
            if not _NORM.match(name) or weight is None or width == 0:
                continue
            if weight.numel() != width:
                return None  # over all heads
            norms.append(inner)
        direct = [
            name
            for name, parameter in self._inventory.modules[path]._parameters.items()
            if parameter is not None and f"{under(path)}{name}" not in self._planned
        ]
        return None if direct and width else tuple(norms)

    def _by_head(self, path: str, heads: Heads) -> dict[str, tuple[Runs, ...]]:
        """Return how parameters beside the layers of attention are divided, which the model's plan names."""
        found = {}
        for name, parameter in self._inventory.modules[path]._parameters.items():
            if parameter is not None and len(parameter) % heads.total == 0:
                found[f"{under(path)}{name}"] = scaled(heads.own, len(parameter) // heads.total)
        return found

    def _holders(self, path: str, layer: Layer) -> tuple[str, ...]:
        parent = layer.path.rpartition(".")[0]
        return (path,) if parent == path else (parent, path)

    def _modules(self, holders: Sequence[str]) -> list[nn.Module]:
        return [self._inventory.modules[name] for name in holders]

    def _heads(self, holders: Sequence[str], layer: Layer) -> int | None:
        """Return the number of heads of queries, as modules or their configuration say."""
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
            cut = Cut("column", joined([(inner, runs)] * 2) if halves else runs)
            return Block(path, {layer.path: cut for layer in found} | {row.path: Cut("row", runs)}, row.path)
        return None

    def _normed(self, path: str, features: int) -> bool:
        """Whether a module has a norm over so many features."""
        weights = (child._parameters.get("weight") for child in self._inventory.modules[path].children())
        return any(weight is not None and weight.dim() == 1 and len(weight) == features for weight in weights)

    def _linear(self, path: str, name: str) -> Layer | None:
        return self._inventory.linear(f"{under(path)}{name}")


def _joined_cut(heads: Heads, parts: Sequence[tuple[Runs, ...]]) -> Cut:
    """Return the cut of a projection with several in a row; whole on each rank where ranks share some of it."""
    sizes = [max(end for own in runs for _, end in own) for runs in parts]
    runs = joined(list(zip(sizes, parts, strict=True)))
    return Cut("picked" if heads.shares else "column", runs)


def even(total: int, size: int, path: str, grain: int = 1) -> tuple[Runs, ...]:
    """Return runs of features that are as equal as can be, of whole grains, of which the last may be less.

    Raises:
        ConfigError: there are fewer grains than ranks; names the layer.
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
    """Experts whose weights are stacked in tensors of three dimensions.

    Attributes:
        inner: features between the projections.
        first: of each stacked first projection (and its biases) the dimension of these, and how they are divided.
        last: the stacked last projection, and the dimension of these in it.
        last_bias: its biases, which are added once.
        runs: how the inner features are divided.
    """

    inner: int
    first: dict[str, tuple[int, tuple[Runs, ...]]]
    last: tuple[str, int]
    last_bias: str | None
    runs: tuple[Runs, ...]


def stacked(module: nn.Module, path: str, size: int, grain: int) -> Stacked | None:
    """Return how a module's stacked experts are divided, if it has some; routing and what comes after stay whole."""
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
