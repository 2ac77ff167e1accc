"""Layer files: checkpoints of models as sequences of layers, which DeepSpeed divides into stages.

`layer_NN-model_states.pt` has the state dict of layer NN (`layer_NN-model_MM-model_states.pt` of model-parallel rank
MM). Each `mp_rank_XX` is one model-parallel rank of one stage: the stage is XX divided by the number of model-parallel
ranks. Its parameters are named `NN.<name>`; those of layers that share a module are named `tied_modules.<key>.<name>`
on each stage that has the module, and the file of the first of these layers has its values.

Here parameters of such a model are named `layers.NN.<name>`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.formats.deepspeed.index import LAYER, OpenFiles
from shardwise.checkpoint.formats.deepspeed.zero_partitions import OptimizerFile
from shardwise.checkpoint.manifest import outline
from shardwise.errors import CheckpointError

_OWN = re.compile(r"(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")


def layer_name(name: str, tied: Mapping[str, int] | None = None) -> str:
    """Return the name in a model of layers. `tied` has the first layer of each key; without it the name is unchanged.

    >>> layer_name("3.norm.weight"), layer_name("tied_modules.emb.weight", {"emb": 0})
    ('layers.3.norm.weight', 'layers.0.weight')
    """
    own, shared = _OWN.fullmatch(name), _TIED.fullmatch(name)
    if own is not None:
        return f"layers.{name}"
    if shared is not None and tied is not None and shared[1] in tied:
        return f"layers.{tied[shared[1]]}.{shared[2]}"
    return name


def stage_name(name: str, tied: Mapping[str, int]) -> str:
    """Return the name in DeepSpeed's files, the reverse of `layer_name`. Raises CheckpointError for other names.

    >>> stage_name("layers.3.norm.weight", {}), stage_name("layers.0.weight", {"emb": 0})
    ('3.norm.weight', 'tied_modules.emb.weight')
    """
    prefix, _, rest = name.partition(".")
    own = _OWN.fullmatch(rest)
    if prefix != "layers" or own is None:
        raise CheckpointError(f"parameter {name!r}: expected the name of a layer, such as layers.3.weight")
    key = next((key for key, layer in tied.items() if layer == int(own[1])), None)
    return rest if key is None else f"tied_modules.{key}.{own[2]}"


def numbers_of(names: Iterable[str]) -> set[int]:
    """Return the layers that own some names."""
    return {int(found[1]) for name in names if (found := _OWN.fullmatch(name)) is not None}


def keys_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of shared modules in order, with the names inside of each."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (match := _TIED.fullmatch(name)) is not None:
            found.setdefault(match[1], []).append(match[2])
    return found


def all_names(model: Mapping[str, Any], groups: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of the parameters of some groups, and of frozen parameters and buffers in model states."""
    every = [*groups, model.get("frozen_param_shapes") or {}, model["buffer_names"]]
    return list(dict.fromkeys(name for group in every for name in group))


def tied_by_gaps(stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the first layer of each shared module, from the names of each stage without layer files.

    The layers of a stage are numbered from behind those of the stage before to those of the next. Keys are in the order
    of their first layers. A stage with as many layers without a name as new keys therefore shows them; other keys are
    left out.
    """
    held = [sorted(numbers_of(names)) for names in stages]
    found: dict[str, int] = {}
    seen: set[str] = set()
    for number, names in enumerate(stages):
        new = [key for key in keys_of(names) if key not in seen]
        seen.update(new)
        first = max((n for some in held[:number] for n in some), default=-1) + 1
        end = min((n for some in held[number + 1 :] for n in some), default=None)
        if end is None:  # of the last stage, layers behind the last named one are unknown
            continue
        free = [n for n in range(first, end) if n not in held[number]]
        if len(free) == len(new):
            found.update(zip(new, free, strict=True))
    return found


@dataclass
class Stage:
    """Part of a model on one `mp_rank_XX`: its state dict under DeepSpeed's names, the file of each, and trained
    parameters of each group with shapes (None: the files do not name them).
    """

    module: dict[str, Any] = field(default_factory=OrderedDict)
    homes: dict[str, str] = field(default_factory=dict)
    shapes: list[dict[str, Any]] | None = None


class LayerFiles:
    """The layer files of a checkpoint.

    Args:
        files: the files of the checkpoint.
        models: model states of each `mp_rank_XX`, in order.
        optimizers: files of optimizer states of each of them, by rank.
        tensor: number of model-parallel ranks of a stage.

    Attributes:
        parts: the part of the model of each `mp_rank_XX`.
        tied: the first layer of each shared module.
        untold: why trained parameters of stages are unknown, or None.
    """

    def __init__(
        self,
        files: OpenFiles,
        models: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Sequence[OptimizerFile]],
        tensor: int,
    ) -> None:
        self.tensor = tensor
        self.untold: str | None = None
        self._files: dict[tuple[int, int], tuple[str, Mapping[str, Any]]] = {}
        for name in files.layers:
            match = LAYER.fullmatch(name)
            if match is None or bool(match[2]) != (tensor > 1):
                raise CheckpointError(f"{name}: of other model-parallel ranks than {tensor}: files of two checkpoints")
            self._files[int(match[1]), int(match[2] or 0)] = name, files.content(name)
        groups = [_groups(model, ranks) for model, ranks in zip(models, optimizers, strict=True)]
        if None in groups:
            names = [self._counted(models, part) for part in range(len(models))]
        else:
            names = [all_names(model, own or ()) for model, own in zip(models, groups, strict=True)]
        self.tied = self._first_layers(names, models)
        self.parts = [self._part(n, own, groups[n]) for n, own in enumerate(names)]

    # -- stages whose files do not name their parameters -------------------------------------------------------------

    def _counted(self, models: Sequence[Mapping[str, Any]], part: int) -> list[str]:
        """Return the names of a stage by the number of parameters of its optimizer: stages are adjacent layers."""
        stage, rank = divmod(part, self.tensor)
        buffers = {name for model in models for name in model["buffer_names"]}
        held = {n: [f"{n}.{name}" for name in self._files[n, rank][1]] for n, at in sorted(self._files) if at == rank}
        counts = [_optimized(model) for model in models[rank :: self.tensor]]
        trained = {n: sum(name not in buffers for name in names) for n, names in held.items()}
        every = [name for names in held.values() for name in names] if stage == 0 else []
        if sum(trained.values()) != sum(counts):
            self.untold = (
                f"the optimizers of {len(counts)} stages have {outline([str(count) for count in counts])} parameters "
                f"without names, and the layer files {sum(trained.values())}: shared or frozen layers. Save the "
                "checkpoint at ZeRO stage 1, which writes names"
            )
            return every
        own: list[str] = []
        left, current = counts[0], 0
        for n, names in held.items():
            if trained[n] and not left:
                current += 1
                left = counts[current]
            left -= trained[n]
            if left < 0:
                self.untold = f"{self._name(n, rank)} belongs to two stages by the number of its parameters"
                return every
            own += names if current == stage else []
        return own

    # -- assembling --------------------------------------------------------------------------------------------------

    def _first_layers(self, names: Sequence[Sequence[str]], models: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return the first layer of each key: the file of no other layer that has its names and shapes."""
        owned = {n for some in names for n in numbers_of(some)}
        free = sorted({n for n, rank in self._files if n not in owned and self._files[n, rank][1]})
        found: dict[str, int] = {}
        for own, model in zip(names[:: self.tensor], models[:: self.tensor], strict=True):
            shapes = {name: tuple(s) for group in model["param_shapes"] or () for name, s in group.items()}
            for key, inside in keys_of(own).items():
                if key in found:
                    continue
                fitting = [n for n in free if self._fits(n, key, inside, shapes)]
                if len(fitting) > 1 and len(keys_of(own)) == len(free):
                    fitting = fitting[:1]  # keys are in the order of their layers
                if len(fitting) != 1:
                    raise CheckpointError(
                        f"the shared module {key!r} with {outline(inside)}: expected the file of one layer, found "
                        f"{len(fitting)} layer files that fit: {outline([self._name(n, 0) for n in fitting])}"
                    )
                found[key] = fitting[0]
                free.remove(fitting[0])
        if free:
            raise CheckpointError(
                f"{self._name(free[0], 0)}: no stage has parameters of layer {free[0]}: a file of another checkpoint"
            )
        return found

    def _fits(self, layer: int, key: str, inside: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        content = self._files.get((layer, 0), ("", {}))[1]
        expected = [shapes.get(f"tied_modules.{key}.{name}") for name in inside]
        return all(
            name in content and (shape is None or tuple(content[name].shape) == shape)
            for name, shape in zip(inside, expected, strict=True)
        )

    def _part(self, part: int, names: Sequence[str], groups: Sequence[Iterable[str]] | None) -> Stage:
        rank = part % self.tensor
        made = Stage()
        layers = [(n, f"{n}.") for n in sorted(numbers_of(names))]
        layers += [(self.tied[key], f"tied_modules.{key}.") for key in keys_of(names)]
        for n, prefix in layers:
            if (n, rank) not in self._files:
                raise CheckpointError(
                    f"{self._name(n, rank)} is missing: mp_rank_{part:02d}_model_states.pt has parameters of that "
                    "layer. The checkpoint is incomplete: saving it was interrupted, or files were not copied"
                )
            file, content = self._files[n, rank]
            made.module.update((prefix + name, value) for name, value in content.items())
            made.homes.update((prefix + name, file) for name in content)
        if missing := [name for name in names if name not in made.module]:
            raise CheckpointError(
                f"parameters of mp_rank_{part:02d}_model_states.pt are in no layer file: {outline(missing)}: files of "
                "two checkpoints, or a layout that is not known"
            )
        if groups is not None:
            known = [dict(group) if isinstance(group, Mapping) else {} for group in groups]
            made.shapes = [
                {name: own.get(name, made.module[name].shape) for name in group}
                for group, own in zip(groups, known, strict=True)
            ]
        return made

    def _name(self, layer: int, rank: int) -> str:
        part = f"-model_{rank:02d}" if self.tensor > 1 else ""
        return f"layer_{layer:02d}{part}-model_states.pt"


def _optimized(model: Mapping[str, Any]) -> int:
    """Return the number of parameters of the optimizer in a file of model states."""
    wrapped = model["optimizer"] or {}
    state = wrapped.get("optimizer_state_dict", wrapped)
    return sum(len(group["params"]) for group in state.get("param_groups", ()))


def _groups(model: Mapping[str, Any], ranks: Sequence[OptimizerFile]) -> Sequence[Iterable[str]] | None:
    """Return the trained parameters of each group, from model states or from `param_slice_mappings` of all ranks."""
    if model["param_shapes"] is not None or not ranks:
        found: Sequence[Iterable[str]] | None = model["param_shapes"]
        return found
    mapped = [rank["param_slice_mappings"] for rank in ranks]
    return [list(dict.fromkeys(name for group in groups for name in group)) for groups in zip(*mapped, strict=True)]
