"""Tensor-parallel plan: which layers of a model are sharded, and how. In order of precedence:

1. the first matching rule of the configuration (`partition_config.layer_specs`);
2. names of row-parallel layers (`injection_policy_tuple`), or the model's own plan (`tp_plan` of transformers), or
   neither for a family (`preset_model`);
3. the kind of each block, by names and sizes of its layers (`shardwise.parallel.tensor.model_families`), with intact
   heads and sharded parts of fused projections, even if the model's plan would gather outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from shardwise.errors import ConfigError
from shardwise.names import name_search
from shardwise.parallel.tensor.group import Runs
from shardwise.parallel.tensor.heads import HEADS, KEY_HEADS, number, scaled
from shardwise.parallel.tensor.layers import Kind, ShardSpec, joined, stores_inputs_first
from shardwise.parallel.tensor.model_families import SIZE, Block, Finder, Slices, Stacked, even, stacked
from shardwise.parallel.tensor.module_index import Inventory, Layer, under
from shardwise.registry import part_of

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import LayerSpec, TensorParallel

_SECTION = "tensor_parallel"
_RULES = f"{_SECTION}.partition_config.layer_specs"

# Styles of transformers' plans that shard a layer. Other styles describe communication, which follows from these.
_STYLES: dict[str, tuple[Kind, str]] = {
    "colwise": ("column", ""),
    "local_colwise": ("column", ""),
    "colwise_gather_output": ("column", "whole"),
    "colwise_rep": ("column", "whole"),
    "packed_colwise": ("column", "packed"),
    "local_packed_colwise": ("column", "packed"),
    "rowwise": ("row", ""),
    "local_rowwise": ("row", ""),
    "rowwise_split_input": ("row", "whole"),
    "rowwise_rep": ("row", "whole"),
    "packed_rowwise": ("row", "packed"),
    "local_packed_rowwise": ("row", "packed"),
    "embedding_rowwise": ("words", ""),
    "embedding_colwise": ("width", ""),
    "mla_kv_a_proj": ("latent", ""),
}
_SUMMED = "replicated_with_grad_allreduce"

# Value of `preset_model` -> layers that identify its blocks.
PRESETS = {
    "llama": ("q_proj", "up_proj"),
    "qwen2": ("q_proj", "up_proj"),
    "mixtral": ("q_proj", "w1", "up_proj"),
    "bloom": ("query_key_value", "dense_h_to_4h"),
    "chatglm": ("query_key_value", "dense_h_to_4h"),
    "deepseek_v2": ("kv_b_proj", "q_proj", "up_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
}


@dataclass
class TensorParallelPlan:
    """Sharding of a model; layers, modules and parameters by name."""

    layers: dict[str, ShardSpec] = field(default_factory=dict)
    experts: dict[str, Stacked] = field(default_factory=dict)  # modules of stacked experts
    # other parameters, sharded in their first dimension
    vectors: dict[str, tuple[Runs, ...]] = field(default_factory=dict)
    summands: list[str] = field(default_factory=list)  # unsharded modules whose parameters have partial gradients
    slices: Slices = field(default_factory=dict)  # dimension of tensors of which ranks use parts
    blocks: list[Block] = field(default_factory=list)  # attention blocks, whose number of heads is adapted
    head: tuple[str, str] | None = None  # model with a vocabulary-parallel loss, and its output head


def cuts_of(model: nn.Module, size: int, section: TensorParallel, *, experts: bool = True) -> TensorParallelPlan:
    """Return the tensor-parallel plan of a model; raises a ConfigError that names key, layer and supported sizes."""
    return _Planner(model, size, section, experts).division()


class _Planner:
    def __init__(self, model: nn.Module, size: int, section: TensorParallel, experts: bool) -> None:
        self._model, self._size, self._section = model, size, section
        self._inventory = Inventory(model)
        self._finds = name_search(model)
        self._grain = section.tp.tp_grain_size if section.tp is not None else 1
        rules = section.partition_config
        kinds = {cast(Any, module).config.model_type for _, module in self._inventory.pretrained()}
        every = list(enumerate(rules.layer_specs)) if rules is not None else []
        self._rules = [
            (i, rule)
            for i, rule in every
            if rule.partition_type not in ("norm", "whole")  # see `shardwise.parallel.tensor.sequence_parallel`
            and (rule.model_types is None or kinds & set(rule.model_types))
        ]
        self._defaults = rules is None or rules.use_default_specs
        self._strict = rules is not None and rules.strict_mode
        self._embedding_dim = rules.embedding_partition_dim if rules is not None else 1
        self._head_names = rules.lm_head_patterns if rules is not None else ["lm_head", "embed_out"]
        self._experts = experts
        self._cuts: dict[str, ShardSpec] = {}
        self._skipped: set[str] = set()

    def division(self) -> TensorParallelPlan:
        plan = self._plan() if self._defaults else {}
        finder = Finder(self._inventory, self._size, self._grain, plan.keys())
        blocks = list(finder.blocks())
        by_layer = {path: block for block in blocks for path in block.cuts}
        self._by_rules(by_layer)
        self._skip_copies()
        ruled = {*self._cuts, *self._skipped}
        contradicted = {path for block in blocks if self._contradicted(block) for path in block.cuts}
        found = TensorParallelPlan()
        if self._defaults:
            for block in self._chosen(blocks, plan):
                if block.row not in contradicted:
                    self._cuts = block.cuts | self._cuts
            if self._section.injection_policy_tuple is not None:
                self._by_policy(ruled)
            elif self._section.preset_model is None:
                self._by_plan(plan, ruled | contradicted)
            self._heads_and_words(ruled)
        found.blocks = [block for block in blocks if block.heads is not None and self._is_whole(block)]
        found.summands = [path for block in found.blocks for path in block.summands]
        for block in blocks:
            if self._is_whole(block):
                found.slices |= block.slices
        for block in found.blocks:
            found.vectors |= block.vectors
        found.summands += [
            path
            for path, style in plan.items()
            if style == _SUMMED and path not in found.summands and self._in_use(path)
        ]
        if self._experts:
            found.experts = dict(self._stacked())
        self._tie()
        if self._section.vocab_parallel_lm_head:
            found.head = self._divided_head()
        found.layers = dict(self._placed())
        self._check(found)
        return found

    # -- the rules of the configuration --------------------------------------------------------------------------------

    def _by_rules(self, blocks: dict[str, Block]) -> None:
        names = [f"{path}.weight" for path in self._inventory.layers]
        names += [
            f"{under(path)}{name}" for path, module in self._inventory.modules.items() for name in module._parameters
        ]
        for index, rule in self._rules:
            unmatched = [one for one in rule.patterns if not any(self._finds([one], name) for name in names)]
            if unmatched and (self._strict or len(unmatched) == len(rule.patterns)):
                raise ConfigError(
                    f"{_RULES}[{index}].patterns: no parameter of {type(self._model).__name__} matches "
                    f"{', '.join(map(repr, unmatched))}; its matrices are {_some(self._inventory.layers)}"
                )
        for path, layer in self._inventory.layers.items():
            found = self._rule_of(f"{path}.weight")
            if found is None:
                continue
            index, rule = found
            if rule.partition_type == "skip":
                self._skipped.add(path)
            else:
                self._cuts[path] = self._ruled(layer, rule, f"{_RULES}[{index}]", blocks.get(path))

    def _rule_of(self, name: str) -> tuple[int, LayerSpec] | None:
        return next((one for one in self._rules if self._finds(one[1].patterns, name)), None)

    def _skip_copies(self) -> None:
        """Leave weights whole of which other pipeline stages have copies, because stages are divided separately."""
        copies = {path for path, layer in self._inventory.layers.items() if part_of(layer.weight).ranks is not None}
        if wrong := sorted(copies & self._cuts.keys()):
            raise ConfigError(
                f"{_RULES}: {wrong[0]} would be divided, and other pipeline stages have copies of its weight. Give the "
                'layer the partition_type "skip"'
            )
        self._skipped |= copies

    def _ruled(self, layer: Layer, rule: LayerSpec, key: str, block: Block | None) -> ShardSpec:
        dim = rule.partition_dim
        if layer.is_embedding:
            words = (rule.partition_type == "column") if dim is None else dim == 0
            features = layer.weight.shape[0 if words else 1]
            runs = even(features, self._size, layer.path)
            return ShardSpec("words", runs) if words else ShardSpec("width", runs, whole_output=True)
        kind: Kind = "row" if rule.partition_type == "row" else "column"
        if rule.shape is None and dim is not None:
            if dim not in (0, 1):
                raise ConfigError(f"{key}.partition_dim: {layer.path}.weight has the dimensions 0 and 1, not {dim}")
            kind = "row" if (dim == 1) != stores_inputs_first(layer.module) else "column"
        features = layer.inputs if kind == "row" else layer.outputs
        known = block.cuts[layer.path] if block is not None else None
        if rule.shape is not None:
            width = block.features[0] // block.heads.total if block is not None and block.heads is not None else 1
            runs = self._fused(features, rule, f"{key}.shape", layer, kind, width)
        elif known is not None and not rule.gather_output and (known.kind == "row") == (kind == "row"):
            return known
        else:
            runs = even(features, self._size, layer.path)
        return ShardSpec(kind, runs, whole_output=rule.gather_output and kind == "column")

    def _fused(
        self, features: int, rule: LayerSpec, key: str, layer: Layer, kind: Kind, grain: int
    ) -> tuple[Runs, ...]:
        shape: list[Any] = list(rule.shape or ())
        dim = (len(shape) - 1 if kind == "row" else 0) if rule.partition_dim is None else rule.partition_dim
        if dim >= len(shape):
            raise ConfigError(f"{key}: {shape} has no dimension {dim} ({_RULES}[].partition_dim)")
        repeats = math.prod(shape[:dim]) if kind == "column" else 1
        sizes = self._sub_sizes(shape[dim], features, repeats, outermost=dim == 0 or kind == "row")
        if repeats < 1 or sizes is None or sum(sizes) * repeats != features:
            raise ConfigError(
                f"{key}: {layer.path}.weight has {features} features there, which are not what {rule.shape} says"
            )
        parts = [
            (one, even(one // grain, self._size, layer.path) if one % grain == 0 else even(one, self._size, layer.path))
            for one in sizes
        ]
        runs = [(one, scaled(found, grain) if one % grain == 0 else found) for one, found in parts]
        return joined(runs * repeats)

    @staticmethod
    def _sub_sizes(entry: Any, features: int, repeats: int, *, outermost: bool) -> list[int] | None:
        """Return the sizes of fused parts: a list, or, in the first dimension, their number."""
        if isinstance(entry, list | tuple):
            return [int(one) for one in entry]
        if repeats < 1 or features % repeats:
            return None
        extent = features // repeats
        if entry == -1 or not outermost:
            return [extent]
        return [extent // entry] * entry if entry > 0 and extent % entry == 0 else None

    def _contradicted(self, block: Block) -> bool:
        """Return True if a rule for a layer of a block prevents the sharding of its other layers."""
        return any(
            path in self._skipped
            or (
                path in self._cuts
                and ((self._cuts[path].kind == "row") != (cut.kind == "row") or self._cuts[path].whole_output)
            )
            for path, cut in block.cuts.items()
        )

    # -- the model's plan -------------------------------------------------------------------------------------------

    def _plan(self) -> dict[str, str]:
        if self._section.preset_model is not None or self._section.injection_policy_tuple is not None:
            return {}
        patterns: dict[re.Pattern[str], str] = {}
        for prefix, module in reversed(list(self._inventory.pretrained())):
            own = dict(getattr(module, "_tp_plan", None) or {})
            if getattr(module, "base_model", None) is module:
                own = dict(getattr(module.config, "base_model_tp_plan", None) or {}) | own
            for name, style in own.items():
                escaped = re.escape(f"{under(prefix)}{name}").replace(r"\*", r"\d+")
                patterns[re.compile(f"{escaped}$")] = style
        names = [*self._inventory.modules]
        names += [
            f"{under(path)}{name}" for path, module in self._inventory.modules.items() for name in module._parameters
        ]
        found: dict[str, str] = {}
        for name in names:
            styles = [style for pattern, style in patterns.items() if pattern.match(name)]
            if styles and isinstance(styles[-1], str):  # style of the outermost model
                found[name] = styles[-1]
        return found

    def _chosen(self, blocks: list[Block], plan: dict[str, str]) -> list[Block]:
        preset, named = self._section.preset_model, self._row_names()
        if named is not None:
            return [block for block in blocks if _named(block.row, named)]
        if preset is None:
            return [block for block in blocks if not self._gathers(block, plan)]
        leaders = PRESETS[preset]
        found = [block for block in blocks if any(_named(path, leaders) for path in block.cuts)]
        if not found:
            raise ConfigError(
                f"{_SECTION}.preset_model: {type(self._model).__name__} has no layers as those of {preset!r} "
                f"({', '.join(leaders)}); its matrices are {_some(self._inventory.layers)}"
            )
        return found

    @staticmethod
    def _gathers(block: Block, plan: dict[str, str]) -> bool:
        columns = [path for path, cut in block.cuts.items() if cut.kind in ("column", "picked")]
        whole = [path for path in columns if plan.get(path) in _STYLES and _STYLES[plan[path]][1] == "whole"]
        return len(columns) > 1 and len(whole) > 0

    def _by_plan(self, plan: dict[str, str], ruled: set[str]) -> None:
        for path, style in plan.items():
            layer = self._inventory.layers.get(path)
            if layer is None or style not in _STYLES or path in self._cuts or path in ruled:
                continue
            kind, form = _STYLES[style]
            if kind in ("words", "width") or layer.is_embedding:
                dim = int(kind == "width")
                runs = even(layer.weight.shape[dim], self._size, path)
                self._cuts[path] = ShardSpec("width", runs, whole_output=True) if dim else ShardSpec("words", runs)
            elif kind == "latent":
                raise ConfigError(
                    f"{SIZE}: the plan of {type(self._model).__name__} has {path} as {style!r}, but the attention that "
                    f"it is in is not known. Write rules for its layers in {_RULES}"
                )
            else:
                self._cuts[path] = self._planned(layer, kind, form)

    def _planned(self, layer: Layer, kind: Kind, form: str) -> ShardSpec:
        features = layer.inputs if kind == "row" else layer.outputs
        if form == "packed":
            if features % 2:
                raise ConfigError(f"{SIZE}: {layer.path} has {features} features, and should have two halves")
            runs = joined([(features // 2, even(features // 2, self._size, layer.path, self._grain))] * 2)
            return ShardSpec(kind, runs)
        if form == "whole":
            runs = even(features, self._size, layer.path, self._grain)
            return ShardSpec(kind, runs, whole_output=kind == "column", whole_input=kind == "row")
        return ShardSpec(kind, self._by_head(layer, features))

    def _by_head(self, layer: Layer, features: int) -> tuple[Runs, ...]:
        """Return ranges of whole heads for a layer in attention, otherwise of features."""
        parent, _, name = layer.path.rpartition(".")
        module = self._inventory.modules[parent]
        within = "attn" in parent.rpartition(".")[2].lower() or "attention" in type(module).__name__.lower()
        places = [module, getattr(module, "config", None)]
        names = KEY_HEADS if re.match(r"(?:k|v|key|value)(?:_|$)", name) else HEADS
        heads = (number(places, names) or number(places, HEADS)) if within else None
        if heads is None or features % heads:
            return even(features, self._size, layer.path, self._grain)
        return scaled(even(heads, self._size, f"{layer.path} (its heads)"), features // heads)

    def _row_names(self) -> list[str] | None:
        given = self._section.injection_policy_tuple
        if given is None:
            return None
        found = [name for entry in given for name in (entry if isinstance(entry, list | tuple) else [entry])]
        for name in found:
            if not isinstance(name, str) or not any(_named(path, [name]) for path in self._inventory.layers):
                raise ConfigError(
                    f"{_SECTION}.injection_policy_tuple: {type(self._model).__name__} has no linear layer {name!r}; "
                    f"its matrices are {_some(self._inventory.layers)}"
                )
        return found

    def _by_policy(self, ruled: set[str]) -> None:
        """Shard the policy's layers by rows, and the layers that feed them by columns."""
        names = self._row_names() or []
        rows = [layer for path, layer in self._inventory.layers.items() if _named(path, names)]
        all_rows = {layer.path for layer in rows}
        for row in rows:
            if row.path in self._cuts or row.path in ruled:
                continue
            place = row.path.rpartition(".")[0]
            while True:
                beside = [
                    layer
                    for layer in self._inventory.below(place)
                    if layer.path not in all_rows and layer.path not in ruled and layer.path not in self._cuts
                ]
                if beside or not place:
                    break
                place = place.rpartition(".")[0]
            self._cuts[row.path] = ShardSpec("row", self._by_head(row, row.inputs))
            for layer in beside:
                self._cuts[layer.path] = ShardSpec("column", self._by_head(layer, layer.outputs))

    # -- words ---------------------------------------------------------------------------------------------------------

    def _heads_and_words(self, ruled: set[str]) -> None:
        """Shard output heads by words; embeddings by words if tied to a head, otherwise by width."""
        models = [model for _, model in self._inventory.pretrained()]
        outputs = [_embeddings(model, "get_output_embeddings") for model in models]
        for path, layer in self._inventory.layers.items():
            named = any(re.search(rf"(?:^|\.){pattern}$", path) for pattern in self._head_names)
            is_head = named or any(layer.module is found for found in outputs)
            if is_head and not layer.is_embedding and path not in ruled:
                runs = even(layer.outputs, self._size, path, self._grain)
                self._cuts[path] = ShardSpec("column", runs, whole_output=True)
        words = [found.weight for model in models if (found := _embeddings(model, "get_input_embeddings")) is not None]
        shared, layers = self._sharing(), self._inventory.layers
        for path, layer in layers.items():
            tied = any(not layers[other].is_embedding for other in shared[id(layer.weight)])
            known = path in ruled or path in self._cuts or not any(layer.weight is found for found in words)
            if tied or known or not layer.is_embedding or cast(nn.Embedding, layer.module).max_norm is not None:
                continue
            if self._embedding_dim == 0:
                self._cuts[path] = ShardSpec("words", even(layer.weight.shape[0], self._size, path, self._grain))
            else:
                self._cuts[path] = ShardSpec("width", even(layer.weight.shape[1], self._size, path), whole_output=True)

    def _sharing(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for path, layer in self._inventory.layers.items():
            found.setdefault(id(layer.weight), []).append(path)
        return found

    def _tie(self) -> None:
        layers = self._inventory.layers
        for paths in self._sharing().values():
            cut = next((self._cuts[path] for path in paths if path in self._cuts), None)
            whole = [path for path in paths if path not in self._cuts]
            if cut is None or not whole:
                continue
            for path in whole:
                if path in self._skipped or not layers[path].is_embedding or cut.kind not in ("column", "words"):
                    raise ConfigError(
                        f"{_SECTION}: {', '.join(p for p in paths if p in self._cuts)} would be divided, and has the "
                        f"same weight as {path}, which would not. Divide both or neither ({_RULES})"
                    )
                self._cuts[path] = ShardSpec("words", cut.runs)

    def _divided_head(self) -> tuple[str, str]:
        for path, model in self._inventory.pretrained():
            head = _embeddings(model, "get_output_embeddings")
            found = next((name for name, layer in self._inventory.layers.items() if layer.module is head), None)
            if found is None or found not in self._cuts:
                continue
            self._cuts[found] = replace(self._cuts[found], whole_output=False, whole_in_evaluation=True)
            return path, found
        raise ConfigError(
            f"{_SECTION}.vocab_parallel_lm_head: {type(self._model).__name__} is no model of transformers with an "
            "output head that is divided. In a model of your own divide the head by a rule with "
            '"partition_type": "column", and compute the loss with '
            "shardwise.parallel.tensor.loss.words_cross_entropy"
        )

    # -- consistency ---------------------------------------------------------------------------------------------------

    def _is_whole(self, block: Block) -> bool:
        return all(self._cuts.get(path) == cut for path, cut in block.cuts.items())

    def _in_use(self, path: str) -> bool:
        """Return True if a sibling is column-parallel, because ranks then use the module differently."""
        cuts = (self._cuts.get(layer.path) for layer in self._inventory.below(path.rpartition(".")[0]))
        return any(cut is not None and cut.kind == "column" and not cut.whole_output for cut in cuts)

    def _stacked(self) -> Iterator[tuple[str, Stacked]]:
        if self._section.injection_policy_tuple is not None:
            return
        for path, module in self._inventory.modules.items():
            found = stacked(module, path, self._size, self._grain)
            if found is None:
                continue
            rules = [self._rule_of(f"{path}.{name}") for name in (*found.first, found.last[0])]
            named = [rule.partition_type for _, rule in filter(None, rules)]
            if "skip" not in named and (self._defaults or named):
                yield path, found

    def _placed(self) -> Iterator[tuple[str, ShardSpec]]:
        for path, cut in self._cuts.items():
            for place in self._inventory.layers[path].places:
                yield place, cut
                yield from adapters(self._model, place, cut)

    def _check(self, found: TensorParallelPlan) -> None:
        if not found.layers and not found.experts:
            raise ConfigError(
                f"{SIZE}: no layer of {type(self._model).__name__} is divided: it has no plan of transformers, and no "
                f"block whose layers have known names. Name its layers in {_RULES}; its matrices are "
                f"{_some(self._inventory.layers)}"
            )
        left = [path for path in self._inventory.layers if path not in self._cuts and path not in self._skipped]
        if self._strict and left:
            raise ConfigError(
                f"{_SECTION}.partition_config.strict_mode: nothing says how to divide {_some(left)}. Add rules for "
                f'them to {_RULES}, or "partition_type": "skip" to leave them whole'
            )


def adapters(model: nn.Module, place: str, cut: ShardSpec) -> Iterator[tuple[str, ShardSpec]]:
    """Yield the sharding of low-rank adapter matrices around a layer; raises a ConfigError for other adapters.

    The second matrix is sharded for a column-parallel layer, the first for a row-parallel layer.
    """
    outer, _, last = place.rpartition(".")
    if last != "base_layer":
        return
    wrapper: Any = model.get_submodule(outer)
    kind = type(wrapper)
    low_rank = kind.__module__.startswith("peft.tuners.lora.") and cut.kind not in ("words", "width")
    variants = [name for name in ("use_dora", "lora_variant") if any(dict(getattr(wrapper, name, None) or {}).values())]
    if not low_rank or variants:
        raise ConfigError(
            f"{SIZE}: {outer} has an adapter of the kind {kind.__module__}.{kind.__name__}"
            + (f" with {', '.join(variants)}" if variants else "")
            + ", which cannot be divided with it. Use plain LoRA of linear layers, or leave the layer whole: a rule "
            f'with "partition_type": "skip" in {_RULES}'
        )
    matrices = "lora_A" if cut.kind == "row" else "lora_B"
    for name in getattr(wrapper, matrices):
        yield f"{outer}.{matrices}.{name}", cut


def _embeddings(model: nn.Module, name: str) -> Any:
    try:
        found = getattr(model, name)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) and hasattr(found, "weight") else None


def _named(path: str, names: Any) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _some(paths: Any) -> str:
    short = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", path) for path in paths))
    return ", ".join(short[:12]) + (f" and {len(short) - 12} more" if len(short) > 12 else "") if short else "none"
