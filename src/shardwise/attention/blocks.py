"""Block-sparse attention of plain torch operators, with an exact backward pass.

Some rows of blocks form a tile. The keys that any row of a tile attends to are gathered, and two batched matrix
products compute many tiles together. As in flash attention (Dao et al., 2205.14135) the forward pass keeps the output
and a logarithm of sums for each query, and the backward pass computes weights again. So time falls with the number of
blocks, and memory grows with tokens, not with their square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.compat import has_values
from shardwise.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]

_SCORES = {"cpu": 1 << 19}  # scores that are computed together: in fp32 2 MiB, which a cache holds
_MORE_SCORES = 1 << 26  # of other devices: 256 MiB, for few launches
_GATHER = 8  # the cost of gathering a block of keys, in products of two blocks
_RECENT = 8  # lengths of sequences, and sizes of batches, of which plans are kept


@dataclass
class Chunk:
    """Tiles that are computed together.

    Attributes:
        heads: head of each tile, (tiles,).
        tiles: number of each tile in its head, (tiles,).
        columns: gathered blocks of keys of each tile, (tiles, columns).
        seen: True where a row of a tile attends to a gathered block, (tiles, rows, columns).
        kept: indices and masks on devices, by name and device (`keep`).
    """

    heads: Array
    tiles: Array
    columns: Array
    seen: Array
    kept: dict[Hashable, torch.Tensor] = field(default_factory=dict)


def keep(kept: dict[Hashable, Any], key: Hashable, like: torch.Tensor, make: Callable[[], Any]) -> Any:
    """Return `kept[key]`, made at the first call with it. Fake tensors, those of a dry run, are not kept."""
    if not has_values(like):
        return make()
    if key not in kept:
        with torch.inference_mode(False):  # because autograd does not save tensors of inference mode
            kept[key] = make()
    return kept[key]


def recent(kept: dict[Any, Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """Return `kept[key]`, made if it is absent; the values that were used last are kept."""
    kept[key] = found = kept.pop(key) if key in kept else make()
    if len(kept) > _RECENT:
        kept.pop(next(iter(kept)))
    return found


class BlockPlan:
    """How the blocks of a layout are computed: tiles of rows, in order of their number of columns.

    Args:
        layout: boolean, (heads, blocks, blocks).
        block: tokens of a block's side.

    Attributes:
        rows: rows of blocks in a tile.
        masks: block masks of flex attention, by tokens, causality and device (`keep`).
    """

    def __init__(self, layout: Array, block: int) -> None:
        self.layout, self.block = np.ascontiguousarray(layout, dtype=bool), block
        self.heads, self.blocks = layout.shape[:2]
        sizes = [size for size in (1, 2, 4, 8, 16) if size == 1 or size * block <= 256]
        costs = [int(self._tiles(size).any(2).sum()) * (size + _GATHER) for size in sizes]
        self.rows = sizes[costs.index(min(costs))]
        self.masks: dict[Hashable, Any] = {}
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._parts: dict[tuple[int, ...], BlockPlan] = {}

    def __reduce__(self) -> Any:
        return BlockPlan, (self.layout, self.block)  # because what is kept cannot be pickled

    def _tiles(self, rows: int) -> Array:
        padded = np.pad(self.layout, ((0, 0), (0, -self.blocks % rows), (0, 0)))
        return padded.reshape(self.heads, -1, rows, self.blocks)

    @cached_property
    def causal(self) -> BlockPlan:
        """The plan without blocks above the diagonal."""
        return BlockPlan(np.tril(self.layout), self.block)

    def of_heads(self, heads: tuple[int, ...]) -> BlockPlan:
        """Return the plan of some of the heads."""
        if heads == tuple(range(self.heads)):
            return self
        if heads not in self._parts:
            self._parts[heads] = BlockPlan(self.layout[list(heads)], self.block)
        return self._parts[heads]

    def chunks(self, samples: int, device: torch.device) -> list[Chunk]:
        """Return the tiles in chunks, for a number of samples in a batch, of a size that suits the device."""
        key = samples, _SCORES.get(device.type, _MORE_SCORES)
        found: list[Chunk] = recent(self._chunks, key, lambda: list(self._divided(*key)))
        return found

    def _divided(self, samples: int, scores: int) -> Iterator[Chunk]:
        tiles = self._tiles(self.rows)
        each = tiles.shape[1]
        tiles = tiles.reshape(-1, self.rows, self.blocks)
        union: Array = np.any(tiles, axis=1)
        counts: Array = np.sum(union, axis=1)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]  # queries without keys have the output 0
        first = 0
        while first < len(order):
            most = int(counts[order[first]])
            size = max(1, scores // (samples * self.rows * self.block**2 * most))
            # Tiles with much fewer columns wait for the next chunk, because columns are padded to the most.
            alike = int(np.count_nonzero(counts[order[first : first + size]] * 4 >= most * 3))
            some = order[first : first + alike]
            columns = np.argsort(~union[some], axis=1, kind="stable")[:, :most]
            seen = np.take_along_axis(tiles[some], columns[:, None, :], axis=2)
            yield Chunk(some // each, some % each, columns, seen)
            first += alike


@dataclass
class Setting:
    """The constants of a call."""

    plan: BlockPlan
    tokens: int
    causal: bool
    scale: float
    dropout: float
    seed: int


class _Buffers:
    """Memory that chunks use one after the other, because an allocator would fragment by their different sizes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._flat = device, dict[str, torch.Tensor]()

    def of(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory of a shape."""
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or len(flat) < size:
            self._flat.pop(name, None)
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(*shape)

    def take(self, name: str, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Gather (samples, all, tokens, width) by (tiles, ...) to (samples, tiles, tokens of a tile, width)."""
        samples, _, tokens, width = tensor.shape
        found = self.of(name, (samples, index.numel(), tokens, width), tensor.dtype)
        torch.index_select(tensor, 1, index.flatten(), out=found)
        return found.view(samples, len(index), -1, width)

    def product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the matrix products of two batches."""
        found = self.of(name, (*a.shape[:-1], b.shape[-1]), a.dtype)
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=found.flatten(0, 1))
        return found

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in another dtype, or as it is."""
        return tensor if tensor.dtype == dtype else self.of(name, tensor.shape, dtype).copy_(tensor)


@dataclass
class _Tile:
    """Indices and masks of a chunk on the device of `like`."""

    setting: Setting
    chunk: Chunk
    like: torch.Tensor
    groups: int

    def index(self, name: str, make: Callable[[], Array]) -> torch.Tensor:
        """Return an array on the device; a CPU shares its memory, another device keeps its copy."""
        device = self.like.device

        def there() -> torch.Tensor:
            # The host waits for the copy, because later calls may use it on other streams.
            return torch.from_numpy(np.require(make(), requirements=["C", "W"])).to(device)

        return there() if device.type == "cpu" else keep(self.chunk.kept, (name, device), self.like, there)

    @cached_property
    def queries(self) -> torch.Tensor:
        """Positions of the tiles among those of all heads."""
        plan, chunk = self.setting.plan, self.chunk
        return self.index("queries", lambda: chunk.heads * -(-plan.blocks // plan.rows) + chunk.tiles)

    @cached_property
    def keys(self) -> torch.Tensor:
        """Positions of the gathered blocks among those of all key heads."""
        blocks, chunk = self.setting.plan.blocks, self.chunk
        first = f"keys of {self.groups} heads"
        return self.index(first, lambda: (chunk.heads // self.groups)[:, None] * blocks + chunk.columns)

    @property
    def columns(self) -> torch.Tensor:
        """The chunk's columns on the device."""
        return self.index("columns", lambda: self.chunk.columns)

    def hide(self, scores: torch.Tensor, buffers: _Buffers) -> None:
        """Set scores, (samples, tiles, queries, keys), to -inf where a query does not see a key."""
        chunk, plan, tokens = self.chunk, self.setting.plan, self.setting.tokens
        tiles, rows, columns = chunk.seen.shape
        if not chunk.seen.all():
            blocks = scores.view(-1, tiles, rows, plan.block, columns, plan.block)
            blocks.masked_fill_(self.index("hidden", lambda: ~chunk.seen)[:, :, None, :, None], -math.inf)
        if not self.setting.causal and tokens % plan.block == 0:
            return
        inside = torch.arange(plan.block, device=self.like.device)
        keys = (self.columns[:, :, None] * plan.block + inside).flatten(1)[:, None, :]
        if not self.setting.causal:
            scores.masked_fill_(keys >= tokens, -math.inf)
            return
        size = rows * plan.block  # a query that exists sees no key after the last one
        queries = self.index("tiles", lambda: chunk.tiles)[:, None, None] * size
        late = buffers.of("late", scores.shape[1:], torch.bool)
        torch.gt(keys, queries + torch.arange(size, device=self.like.device)[None, :, None], out=late)
        scores.masked_fill_(late, -math.inf)

    def bias_index(self, heads: int) -> tuple[torch.Tensor, ...]:
        """Return head, row block and column block of each pair of blocks, (tiles, rows, columns)."""
        chunk, plan = self.chunk, self.setting.plan
        shape = chunk.seen.shape

        def rows() -> Array:  # rows that fill the last tile see nothing
            found = chunk.tiles[:, None] * plan.rows + np.arange(plan.rows)
            return np.minimum(found, plan.blocks - 1)[:, :, None]

        parts: dict[str, Callable[[], Array]] = {
            f"head of {heads}": lambda: (chunk.heads if heads > 1 else np.zeros_like(chunk.heads))[:, None, None],
            "rows": rows,
            "all columns": lambda: chunk.columns[:, None, :],
        }
        return tuple(self.index(name, lambda part=part: np.broadcast_to(part(), shape)) for name, part in parts.items())  # type: ignore[misc]

    def kept(self, number: int, scores: torch.Tensor) -> torch.Tensor | None:
        """Return the factors of dropout; the same at each call."""
        rate = self.setting.dropout
        if rate == 0.0:
            return None
        generator = (
            torch.Generator(scores.device).manual_seed(self.setting.seed + number) if has_values(scores) else None
        )
        return torch.empty_like(scores).bernoulli_(1 - rate, generator=generator).div_(1 - rate or 1.0)


def _in_blocks(tensor: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """Return (samples, heads, tokens, width) as (samples, heads * blocks, block, width), padded with zeros."""
    padded = F.pad(tensor, (0, 0, 0, tokens - tensor.shape[2])) if tokens != tensor.shape[2] else tensor
    return padded.reshape(tensor.shape[0], -1, block, tensor.shape[3])


class _Call:
    """The tensors of a call in blocks; `bias` and `padding` as in `block_attention`."""

    def __init__(
        self,
        setting: Setting,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> None:
        plan = setting.plan
        self.setting, self.wide = setting, torch.promote_types(q.dtype, torch.float32)
        self.buffers = _Buffers(q.device)
        self.columns, self.size = plan.blocks * plan.block, plan.rows * plan.block
        self.queries = -(-plan.blocks // plan.rows) * self.size
        self.q = self.by_tile(q)
        self.k, self.v = (_in_blocks(x, self.columns, plan.block) for x in (k, v))
        self.bias = None if bias is None else self._in_pairs(bias)
        self.padding: torch.Tensor | None = None
        if padding is not None:
            padded = F.pad(padding.to(self.wide), (0, self.columns - padding.shape[1]))
            self.padding = padded.view(len(padded), plan.blocks, plan.block, 1)
        groups = q.shape[1] // k.shape[1]
        self.tiles = [_Tile(setting, chunk, q, groups) for chunk in plan.chunks(len(q), q.device)]

    def by_tile(self, tensor: torch.Tensor) -> torch.Tensor:
        return _in_blocks(tensor, self.queries, self.size)

    def by_token(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Return (samples, heads, tokens, width) of a tensor in tiles or blocks."""
        return tensor.reshape(len(tensor), heads, -1, tensor.shape[-1])[:, :, : self.setting.tokens].contiguous()

    def _in_pairs(self, bias: torch.Tensor) -> torch.Tensor:
        more = self.columns - bias.shape[-1]
        padded = F.pad(bias, (0, more, 0, more)) if more else bias
        blocks, block = self.setting.plan.blocks, self.setting.plan.block
        return padded.reshape(*bias.shape[:2], blocks, block, blocks, block).transpose(3, 4)

    def scores(self, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores of a chunk, (samples, tiles, queries, keys), its queries times the scale, and its keys."""
        buffers = self.buffers
        queries = buffers.take("q", self.q, tile.queries).mul_(self.setting.scale)
        gathered = buffers.take("k", self.k, tile.keys)
        found = buffers.product("product", queries, gathered.mT)
        found = buffers.cast("scores", found, self.wide)
        if self.bias is not None:
            heads, rows, columns = tile.bias_index(self.bias.shape[1])
            pairs = self.bias[:, heads, rows, columns]  # (samples, tiles, rows, columns, block, block)
            found += pairs.transpose(3, 4).reshape(len(pairs), *found.shape[1:])
        if self.padding is not None:
            padding = buffers.take("padding", self.padding, tile.columns)
            found += padding.squeeze(3).unsqueeze(2)
        tile.hide(found, buffers)
        return found, queries, gathered


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        call = _Call(setting, q, k, v, bias, padding)
        buffers = call.buffers
        out = v.new_zeros(*call.q.shape[:3], v.shape[3])
        logs = torch.zeros(*call.q.shape[:3], 1, dtype=call.wide, device=q.device)
        for number, tile in enumerate(call.tiles):
            scores, _, _ = call.scores(tile)
            most = scores.amax(-1, keepdim=True)
            most.masked_fill_(most == -math.inf, 0.0)
            weights = scores.sub_(most).exp_()
            sums = weights.sum(-1, keepdim=True)
            sums.masked_fill_(sums == 0, 1.0)  # a query that sees no key has the output 0
            kept = tile.kept(number, weights)
            if kept is not None:
                weights *= kept
            values = buffers.take("v", call.v, tile.keys)
            found = buffers.product("rows", buffers.cast("weights", weights, v.dtype), values)
            out.index_copy_(1, tile.queries, found.div_(sums))
            logs.index_copy_(1, tile.queries, most + sums.log())
        out = call.by_token(out, q.shape[1])
        ctx.setting = setting
        ctx.save_for_backward(q, k, v, bias, padding, out, logs)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, bias, padding, out, logs = ctx.saved_tensors
        setting: Setting = ctx.setting
        call = _Call(setting, q, k, v, bias, padding)
        wide = call.wide
        grads, dots = call.by_tile(grad), call.by_tile((grad.to(wide) * out.to(wide)).sum(-1, keepdim=True))
        grad_q = torch.zeros_like(call.q)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
        grad_bias = None
        if call.bias is not None and ctx.needs_input_grad[4]:
            grad_bias = torch.zeros(call.bias.shape, dtype=wide, device=q.device)
        buffers = call.buffers
        for number, tile in enumerate(call.tiles):
            scores, queries, keys = call.scores(tile)
            weights = scores.sub_(buffers.take("logs", logs, tile.queries)).exp_()
            own, values = buffers.take("own", grads, tile.queries), buffers.take("v", call.v, tile.keys)
            given = buffers.cast("given", buffers.product("values", own, values.mT), wide)
            kept = tile.kept(number, weights)
            dropped = weights
            if kept is not None:
                given, dropped = given.mul_(kept), weights * kept
            _add(grad_v, tile.keys, buffers.product("keys", buffers.cast("weights", dropped, v.dtype).mT, own))
            given = given.sub_(buffers.take("dots", dots, tile.queries)).mul_(weights)
            if grad_bias is not None:
                _add_pairs(grad_bias, tile, given)
            given = buffers.cast("weights", given, q.dtype)
            grad_q.index_copy_(1, tile.queries, buffers.product("rows", given, keys).mul_(setting.scale))
            _add(grad_k, tile.keys, buffers.product("keys", given.mT, queries))
        if grad_bias is not None and bias is not None:
            grad_bias = grad_bias.transpose(3, 4).reshape(*bias.shape[:2], call.columns, call.columns)
            grad_bias = grad_bias[..., : bias.shape[2], : bias.shape[3]].to(bias.dtype)
        return (
            None,
            call.by_token(grad_q, q.shape[1]),
            call.by_token(grad_k, k.shape[1]).to(k.dtype),
            call.by_token(grad_v, v.shape[1]).to(v.dtype),
            grad_bias,
            None,
        )


def _add(total: torch.Tensor, index: torch.Tensor, found: torch.Tensor) -> None:
    """Add (samples, tiles, tokens of a tile, width) to the blocks of `index`; blocks occur several times."""
    block, width = total.shape[2:]
    total.index_add_(1, index.flatten(), found.reshape(len(found), -1, block, width).to(total.dtype))


def _add_pairs(total: torch.Tensor, tile: _Tile, found: torch.Tensor) -> None:
    samples, heads, _, _, block, _ = total.shape
    tiles, rows, columns = tile.chunk.seen.shape
    pairs = found.view(len(found), tiles, rows, block, columns, block).transpose(3, 4)
    index = tile.bias_index(heads)
    for sample in range(len(pairs)):
        total[sample if samples > 1 else 0].index_put_(index, pairs[sample], accumulate=True)


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockPlan,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return block-sparse attention, (samples, heads, tokens, width); a query that sees no key has the output 0.

    Args:
        query: (samples, heads, tokens, width).
        key: (samples, key heads, tokens, width), in which key heads divide the heads.
        value: as `key`; its width may differ.
        plan: of the layout of these heads and tokens; a last block may be incomplete.
        causal: a query does not see later keys.
        scale: factor of scores; None: width ** -0.5.
        bias: added to scores, (1 or samples, 1 or heads, tokens, tokens); has a gradient.
        padding: added to scores of keys, (samples, tokens); -inf hides a key.
        dropout: probability with which a weight becomes 0, by torch's random numbers of the CPU.

    Gradients of keys are summed in fp32; on CUDA in an order that varies without `torch.use_deterministic_algorithms`.

    Raises:
        UsageError: shapes do not fit the plan or each other.
    """
    samples, heads, tokens, width = query.shape
    blocks = -(-tokens // plan.block)
    if (heads, blocks) != (plan.heads, plan.blocks):
        raise UsageError(
            f"sparse attention: queries have {heads} heads and {blocks} blocks of {plan.block} tokens; the layout has "
            f"{plan.heads} heads and {plan.blocks} blocks"
        )
    if key.shape[2] != tokens or key.shape[:3] != value.shape[:3] or heads % key.shape[1] or len(key) != samples:
        raise UsageError(
            f"sparse attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}; "
            "expected as many keys as queries, and a number of key heads that divides the heads. Caches "
            "(use_cache=True) and attention to another sequence have no layout"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    seed = 0
    if dropout > 0 and has_values(query):
        seed = int(torch.randint(1 << 62, (), device="cpu"))
    setting = Setting(
        plan.causal if causal else plan, tokens, causal, width**-0.5 if scale is None else scale, dropout, seed
    )
    with torch.autocast(kind, enabled=False):
        found: torch.Tensor = _Attention.apply(setting, query, key, value, bias, padding)
    return found
