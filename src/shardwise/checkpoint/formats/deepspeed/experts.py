"""Experts: the files of DeepSpeed that have them, and the experts' names.

Each expert of a layer has a file `layer_L_expert_E_mp_rank_00_model_states.pt`, with the names of a model in which one
rank has all experts. Elsewhere a rank's experts are numbered from 0. At stages 1 and 2 a group of experts is sharded
over its expert-data-parallel group (`partition_count` ranks), in files `zero_pp_rank_R_...`. At stage 0
`expp_rank_R_mp_rank_00_optim_states.pt` has the optimizer of the R-th rank of an expert-parallel group; the model
states have the first rank's.

Expert-parallel groups are adjacent ranks; with `use_data_before_expert_parallelism` expert-data-parallel groups are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.manifest import outline
from shardwise.errors import CheckpointError

_PARTS = re.compile(r"(.*\.deepspeed_experts\.)(\d+)\.(.+)")
_GROUP = re.compile(r"ep_size_(\d+)")


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of `count` experts, with its `number` in file names; names are `prefix`, expert, one of `inside`."""

    number: int
    prefix: str
    count: int
    inside: tuple[str, ...]

    def names(self, experts: Iterable[int]) -> list[str]:
        """Return the names of all parameters of some experts."""
        return [f"{self.prefix}{expert}.{name}" for expert in experts for name in self.inside]


@dataclass(frozen=True)
class Holders:
    """Ranks over which one copy of a flat group is sharded, in order; `names` are its names in the model."""

    ranks: Sequence[int]
    names: Mapping[str, str]

    def name(self, name: str) -> str:
        """Return the name in the model."""
        return self.names.get(name, name)


Place = tuple[ExpertLayer, int, str]
"""Layer, expert number and inner name of an expert's parameter."""


class Experts:
    """The experts of a checkpoint, from `files` by (layer, expert), `counts` of experts of each layer (`num_experts`),
    and a function that opens a file. `values` has all their parameters by the names of the model, `homes` the file of
    each, `layers` is in the model's order.
    """

    def __init__(
        self, files: Mapping[tuple[int, int], str], counts: Sequence[int], opened: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.homes: dict[str, str] = {}
        self.layers = [self._layer(layer, count, files, opened) for layer, count in enumerate(counts)]
        self._by_prefix = {layer.prefix: layer for layer in self.layers}

    def _layer(
        self, number: int, count: int, files: Mapping[tuple[int, int], str], opened: Callable[[str], Mapping[str, Any]]
    ) -> ExpertLayer:
        layers = set()
        for expert in range(count):
            name = files[number, expert]
            content = opened(name)
            parts = [match for key in content if (match := _PARTS.fullmatch(str(key)))]
            prefixes = {match[1] for match in parts if int(match[2]) == expert}
            if len(prefixes) != 1 or len(parts) < len(content):
                raise CheckpointError(
                    f"{name}: expected the tensors <layer>.deepspeed_experts.{expert}.<name> of one layer, found "
                    f"{outline([str(key) for key in content])}: a file of another checkpoint, or a layout that is not "
                    "known"
                )
            layers.add(ExpertLayer(number, prefixes.pop(), count, tuple(match[3] for match in parts)))
            self.values.update(content)
            self.homes.update(dict.fromkeys(content, name))
        if len(layers) != 1:
            raise CheckpointError(f"{files[number, 0]}: its layer has experts of other names: files of two checkpoints")
        return layers.pop()

    def layer_of(self, name: str) -> Place | None:
        """Return layer, expert number and inner name of an expert's parameter."""
        match = _PARTS.fullmatch(name)
        layer = None if match is None else self._by_prefix.get(match[1])
        return None if match is None or layer is None else (layer, int(match[2]), match[3])

    def _places(self, names: Iterable[str]) -> list[Place]:
        return [place for place in map(self.layer_of, names) if place is not None]

    # -- the optimizer's flat groups, stages 1 and 2 -----------------------------------------------------------------

    def holders(
        self, shapes: Sequence[Mapping[str, Any]], counts: Sequence[int], world: int, *, data_first: bool
    ) -> list[list[Holders]]:
        """Return for each flat group the ranks of each of its copies.

        `shapes` and `counts` are `param_shapes` of rank 0, and `partition_count`: ranks over which each group is
        sharded. With `data_first` expert-data-parallel groups are adjacent ranks. Raises CheckpointError if these
        contradict each other.
        """
        numbers: dict[ExpertLayer, set[int]] = {}
        for layer, expert, _ in self._places(name for group in shapes for name in group):
            numbers.setdefault(layer, set()).add(expert)
        here = {layer: len(own) for layer, own in numbers.items()}
        found = []
        for number, (group, count) in enumerate(zip(shapes, counts, strict=True)):
            places = {name: place for name in group if (place := self.layer_of(name)) is not None}
            size = world // count if places else 1
            fits = all(here[layer] * size == layer.count for layer, _, _ in places.values())
            if size * count != world or not fits or len(places) not in (0, len(group)):
                raise CheckpointError(
                    f"parameter group {number} is divided among {count} of {world} ranks, which does not fit its "
                    f"parameters ({outline(list(group))}): a layout that is not known"
                )
            found.append(
                [
                    Holders(
                        [copy * count + i if data_first else i * size + copy for i in range(count)],
                        {
                            name: f"{layer.prefix}{copy * here[layer] + expert}.{inside}"
                            for name, (layer, expert, inside) in places.items()
                        },
                    )
                    for copy in range(size)
                ]
            )
        return found

    # -- the optimizer's numbered parameters, stage 0 ----------------------------------------------------------------

    def sizes(
        self, settings: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]] | None, ranks: int
    ) -> dict[ExpertLayer, int]:
        """Return the expert-parallel size of each layer, from `settings` of parameter groups (DeepSpeed's own for
        experts are called `ep_size_N`), names of parameters in each group of the engine (`members`; None: unknown), and
        the number of files of experts' optimizer states (`ranks`).
        """
        named = {n: int(m[1]) for n, g in enumerate(settings) if (m := _GROUP.fullmatch(str(g.get("name", ""))))}
        different = sorted(set(named.values()))
        if members is None and len(different) > 1:
            raise CheckpointError(
                f"experts were divided over {' and '.join(map(str, different))} ranks, and the file does not give the "
                "number of each layer"
            )
        found = dict.fromkeys(self.layers, different[0] if len(different) == 1 else max(1, ranks))
        for number, names in enumerate(members or ()):
            if number in named:
                found.update((layer, named[number]) for layer, _, _ in self._places(names))
        for layer, size in found.items():
            if layer.count % size:
                raise CheckpointError(
                    f"{layer.count} experts {layer.prefix}* cannot have been divided over {size} ranks"
                )
        return found

    @staticmethod
    def own(sizes: Mapping[ExpertLayer, int], rank: int, ranks: int, *, data_first: bool) -> dict[ExpertLayer, range]:
        """Return the experts of the rank of a file, by layer; `data_first` as for `holders`."""
        found = {}
        for layer, size in sizes.items():
            place = rank * size // ranks if data_first else rank % size
            each = layer.count // size
            found[layer] = range(place * each, (place + 1) * each)
        return found

    def of_rank(self, members: Sequence[Sequence[str]], own: Mapping[ExpertLayer, range]) -> list[list[str]]:
        """Return the members of parameter groups on a rank with experts `own`, from those on the engine's rank. If the
        rank had as many experts as the engine's, each replaces one. Otherwise a layer's experts must be consecutive in
        one group.
        """
        here: dict[ExpertLayer, set[int]] = {}
        groups: dict[ExpertLayer, set[int]] = {}
        for number, names in enumerate(members):
            for layer, expert, _ in self._places(names):
                here.setdefault(layer, set()).add(expert)
                groups.setdefault(layer, set()).add(number)
        found: list[list[str]] = []
        for names in members:
            group: list[str] = []
            done: set[ExpertLayer] = set()
            for name in names:
                place = self.layer_of(name)
                if place is None:
                    group.append(name)
                    continue
                layer, expert, inside = place
                experts = own[layer]
                if len(experts) == len(here[layer]):
                    group.append(f"{layer.prefix}{experts.start + expert - min(here[layer])}.{inside}")
                elif len(groups[layer]) > 1:
                    raise CheckpointError(
                        f"experts {layer.prefix}* are in several parameter groups here, and were {len(experts)} on a "
                        f"rank, not {len(here[layer])}; load it with ep_size={layer.count // len(experts)}"
                    )
                elif layer not in done:
                    done.add(layer)
                    order = [inner for known, number, inner in self._places(names) if (known, number) == place[:2]]
                    group += [f"{layer.prefix}{number}.{inner}" for number in experts for inner in order]
            found.append(group)
        return found
