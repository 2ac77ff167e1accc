"""Experts: the files of DeepSpeed that have them, and the experts' names.

Each expert of a layer has a file `layer_L_expert_E_mp_rank_00_model_states.pt`, with the names of a model in which one
rank has all experts. Elsewhere a rank's experts are numbered from 0. At stages 1 and 2 a group of experts is sharded
over its expert-data-parallel group (`partition_count` ranks), in files `zero_pp_rank_R_...`. At stage 0
`expp_rank_R_mp_rank_00_optim_states.pt` has the optimizer of the R-th rank of an expert-parallel group; the model
states have the first rank's.

Expert-parallel groups are adjacent ranks; with `use_data_before_expert_parallelism` expert-data-parallel groups are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.deepspeed.directory import expert_file
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


class Experts:
    """The experts of a checkpoint, from `files` by (layer, expert), `opened` files, and `counts` of experts of each
    layer (`num_experts`). `values` has all their parameters by the names of the model, `homes` the file of each,
    `layers` is in the model's order.
    """

    def __init__(self, path: str, files: Mapping[tuple[int, int], str], counts: Any, opened: Mapping[str, Any]) -> None:
        self.path = path
        self.layers: list[ExpertLayer] = []
        self._by_prefix: dict[str, ExpertLayer] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.homes: dict[str, str] = {}
        if not isinstance(counts, (list, tuple)) or not all(isinstance(n, int) and n > 0 for n in counts):
            raise CheckpointError(
                f"{path}: num_experts: expected the numbers of experts of all layers, found {counts!r}: a layout that "
                "is not known"
            )
        expected = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count)}
        self._check_files(expected, files, counts)
        for layer, count in enumerate(counts):
            self.layers.append(self._layer(layer, count, files, opened))
        self._by_prefix = {layer.prefix: layer for layer in self.layers}
        if len(self._by_prefix) < len(self.layers):
            raise CheckpointError(f"{path}: files of different layers hold the same experts: files of two checkpoints")

    def _check_files(
        self, expected: set[tuple[int, int]], files: Mapping[tuple[int, int], str], counts: Sequence[int]
    ) -> None:
        missing = [expert_file(*place) for place in sorted(expected - set(files))]
        if missing:
            raise CheckpointError(
                f"{self.path}: files of experts are missing: {outline(missing)}; its layers have "
                f"{', '.join(map(str, counts))} experts. It is incomplete: saving it was interrupted, or files were "
                "not copied"
            )
        beyond = sorted(set(files) - expected)
        if beyond:
            raise CheckpointError(
                f"{self.path}: holds {files[beyond[0]]}, but its layers have {', '.join(map(str, counts))} experts: a "
                "file of another checkpoint. Move files that do not belong to it away"
            )

    def _layer(
        self, number: int, count: int, files: Mapping[tuple[int, int], str], opened: Mapping[str, Any]
    ) -> ExpertLayer:
        found: ExpertLayer | None = None
        for expert in range(count):
            name = files[number, expert]
            parts = {key: _PARTS.fullmatch(str(key)) for key in opened[name]}
            prefix = {match.group(1) for match in parts.values() if match is not None}
            strange = [key for key, match in parts.items() if match is None or int(match.group(2)) != expert]
            strange += [key for key, value in opened[name].items() if not isinstance(value, torch.Tensor)]
            if len(prefix) != 1 or strange:
                raise CheckpointError(
                    f"{os.path.join(self.path, name)}: expected the tensors <layer>.deepspeed_experts.{expert}.<name> "
                    f"of one layer, found {outline(strange or sorted(prefix)) or 'nothing'}: a file of another "
                    "checkpoint, or a layout that is not known"
                )
            inside = tuple(match.group(3) for match in parts.values() if match is not None)
            own = ExpertLayer(number, prefix.pop(), count, inside)
            if found is not None and own != found:
                raise CheckpointError(
                    f"{os.path.join(self.path, name)}: holds {outline(own.names([expert]))}, and expert 0 of the layer "
                    f"{outline(found.names([0]))}: files of several checkpoints"
                )
            found = own
            self.values.update(opened[name])
            self.homes.update(dict.fromkeys(opened[name], name))
        assert found is not None
        return found

    def layer_of(self, name: str) -> tuple[ExpertLayer, int, str] | None:
        """Return layer, expert number and inner name of an expert's parameter."""
        match = _PARTS.fullmatch(name)
        if match is None:
            return None
        layer = self._by_prefix.get(match.group(1))
        return None if layer is None else (layer, int(match.group(2)), match.group(3))

    def check_buffers(self, buffers: Iterable[str]) -> None:
        """Raise CheckpointError if there are buffers inside of experts."""
        for name in buffers:
            if self.layer_of(name) is not None:
                raise CheckpointError(
                    f"{self.path}: {name!r} is a buffer inside of experts, and those of different experts have the "
                    "same name on different ranks; they cannot be imported"
                )

    # -- the optimizer's flat groups, stages 1 and 2 -----------------------------------------------------------------

    def holders(
        self, shapes: Sequence[Mapping[str, Any]], counts: Sequence[int], world: int, *, data_first: bool
    ) -> list[list[Holders]]:
        """Return for each flat group the ranks of each of its copies.

        `shapes` and `counts` are `param_shapes` of rank 0, and `partition_count`: ranks over which each group is
        sharded. With `data_first` expert-data-parallel groups are adjacent ranks. Raises CheckpointError if these
        contradict each other.
        """
        here = self._local(name for group in shapes for name in group)
        found = []
        for number, (group, count) in enumerate(zip(shapes, counts, strict=True)):
            places = {name: self.layer_of(name) for name in group}
            owners = {place[0] for place in places.values() if place is not None}
            if not owners:
                if count != world:
                    raise CheckpointError(f"{self.path}: group {number} is divided among {count} of {world} ranks")
                found.append([Holders(range(world), {})])
                continue
            if None in places.values():
                raise CheckpointError(
                    f"{self.path}: parameter group {number} has both experts and other parameters: a layout that is "
                    "not known"
                )
            size = world // count
            for layer in owners:
                if size * count != world or here[layer] * size != layer.count:
                    raise CheckpointError(
                        f"{self.path}: group {number} is divided among {count} of {world} ranks, which does not fit "
                        f"{here[layer]} of {layer.count} experts {layer.prefix}* on each: a layout that is not known"
                    )
            found.append(
                [
                    Holders(
                        [p * count + i if data_first else i * size + p for i in range(count)],
                        {n: _renumbered(place, p * here[place[0]]) for n, place in places.items() if place},
                    )
                    for p in range(size)
                ]
            )
        return found

    def _local(self, names: Iterable[str]) -> dict[ExpertLayer, int]:
        own: dict[ExpertLayer, set[int]] = {}
        for place in map(self.layer_of, names):
            if place is not None:
                own.setdefault(place[0], set()).add(place[1])
        return {layer: len(numbers) for layer, numbers in own.items()}

    # -- the optimizer's numbered parameters, stage 0 ----------------------------------------------------------------

    def sizes(
        self, settings: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]] | None, ranks: int
    ) -> dict[ExpertLayer, int]:
        """Return the expert-parallel size of each layer, from `settings` of parameter groups (DeepSpeed's own for
        experts are called `ep_size_N`), names of parameters in each group of the engine (`members`; None: unknown), and
        the number of files of experts' optimizer states (`ranks`).
        """
        by_group = {n: int(match.group(1)) for n, g in enumerate(settings) if (match := _GROUP.fullmatch(_name(g)))}
        if members is None and len(set(by_group.values())) > 1:
            raise CheckpointError(
                f"experts were divided over {' and '.join(map(str, sorted(set(by_group.values()))))} ranks, and the "
                "file does not give the number of each layer"
            )
        usual = next(iter(by_group.values())) if len(set(by_group.values())) == 1 else max(1, ranks)
        found = dict.fromkeys(self.layers, usual)
        for number, names in enumerate(members or ()):
            if number in by_group:
                found.update((place[0], by_group[number]) for place in map(self.layer_of, names) if place is not None)
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
            for place in map(self.layer_of, names):
                if place is not None:
                    here.setdefault(place[0], set()).add(place[1])
                    groups.setdefault(place[0], set()).add(number)
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
                    first = [n for n in names if (at := self.layer_of(n)) and at[:2] == (layer, expert)]
                    order = [at[2] for n in first if (at := self.layer_of(n))]
                    group += [f"{layer.prefix}{number}.{inside}" for number in experts for inside in order]
            found.append(group)
        return found


def _renumbered(place: tuple[ExpertLayer, int, str], first: int) -> str:
    layer, expert, inside = place
    return f"{layer.prefix}{first + expert}.{inside}"


def _name(group: Mapping[str, Any]) -> str:
    return str(group.get("name", ""))


def is_of_experts(group: Mapping[str, Any]) -> bool:
    """Return True for the settings of a parameter group of experts."""
    return bool(group.get("moe"))
