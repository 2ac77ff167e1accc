"""Writes checkpoints as DeepSpeed 0.19 lays them out, with torch alone, so that importing can be tested without it.

The layout was read off files that DeepSpeed had written (tests/slow/deepspeed_import.py does so for every stage): keys,
flat buffers, paddings, and the four classes of its own whose names are in the pickles.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import os
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise import boxes
from shardwise.boxes import Region
from shardwise.checkpoint import Checkpoint
from shardwise.registry import cut

VERSION = "0.19.8"

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What stage 0 keeps of a loss scaler."""


def _class(module: str, name: str) -> type:
    return type(name, (), {"__module__": module})


LossScaler = _class("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
DynamicLossScaler = _class("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
fragment_address = _class("deepspeed.utils.tensor_fragment", "fragment_address")
ZeroStageEnum = enum.IntEnum(
    "ZeroStageEnum", {f"stage{n}": n for n in range(4)}, module="deepspeed.runtime.zero.config"
)


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Let pickle find the classes under the names that DeepSpeed gives them."""
    made: list[str] = []
    for found in (LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum):
        parts = found.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                made.append(name)
        setattr(sys.modules[found.__module__], found.__name__, found)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _object(cls: type, **attributes: Any) -> Any:
    made = cls()
    vars(made).update(attributes)
    return made


@dataclass
class Content:
    """What a checkpoint is about, whatever the stage.

    Attributes:
        module: the state dict; tied names have the same tensor.
        buffers: names of buffers in it.
        shared: second names of tied parameters, with the first.
        groups: names of the trained parameters of each group.
        settings: of each group.
        masters: fp32 values of trained parameters.
        states: optimizer state of each of them: tensors of its shape, and numbers.
        steps, samples, skipped: counters.
        scheduler: state of the schedule.
        scaler: attributes of the loss scaler.
        config: DeepSpeed's configuration.
        client: what the script added.
        part, parts: model-parallel rank whose files these are, and how many there are.
        info: what is said of how these divided the model (`universal_checkpoint_info`).
    """

    module: dict[str, torch.Tensor]
    buffers: list[str]
    shared: dict[str, str]
    groups: list[list[str]]
    settings: list[dict[str, Any]]
    masters: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]
    steps: int = 2
    samples: int = 24
    skipped: int = 0
    scheduler: Any = None
    scaler: dict[str, Any] = field(default_factory=lambda: {"cur_scale": 1.0, "dynamic": False})
    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    part: int = 0
    parts: int = 1
    info: Any = None

    @property
    def experts(self) -> dict[str, tuple[str, int, str]]:
        """What names of experts' parameters are made of: layer, number, name inside of the expert."""
        found = ((name, re.fullmatch(r"(.*\.deepspeed_experts\.)(\d+)\.(.*)", name)) for name in self.module)
        return {name: (match[1], int(match[2]), match[3]) for name, match in found if match}

    @property
    def counts(self) -> dict[str, int]:
        """Number of experts of each layer."""
        return {layer: number + 1 for layer, number, _ in sorted(self.experts.values())}

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that no group has."""
        trained = {name for group in self.groups for name in group}
        return [n for n in self.module if n not in trained and n not in self.buffers and n not in self.shared]

    @property
    def narrow(self) -> bool:
        """Whether the module has fewer digits than the masters."""
        return any(self.module[name].dtype != torch.float32 for group in self.groups for name in group)


def content_of(path: str) -> Content:
    """Return what a checkpoint of ours holds."""
    with Checkpoint(path) as saved:
        stored = saved.manifest.of_kind("parameter")
        values = {tensor.name: saved.read(tensor) for tensor in stored}
        module: dict[str, torch.Tensor] = {}
        for tensor in stored:
            inside = values[tensor.name].to(getattr(torch, tensor.compute_dtype or tensor.dtype))
            module.update(dict.fromkeys((tensor.name, *tensor.aliases), inside))
        buffers = {t.name: saved.read(t) for t in saved.manifest.of_kind("buffer") if t.rank is None}
        optimizer = saved.manifest.optimizer
        assert optimizer is not None
        groups: list[list[str]] = [[] for _ in optimizer["groups"]]
        for tensor in stored:
            if tensor.trainable:
                assert tensor.group is not None
                groups[tensor.group].append(tensor.name)
        states: dict[str, dict[str, Any]] = {
            name: {key: saved.decode(value) for key, value in entries.items()}
            for name, entries in optimizer["values"].items()
        }
        for tensor in saved.manifest.of_kind("optimizer/"):
            states.setdefault(tensor.name, {})[tensor.kind.removeprefix("optimizer/")] = saved.read(tensor)
        counters = saved.manifest.counters
        return Content(
            module={**module, **buffers},
            buffers=list(buffers),
            shared={alias: t.name for t in stored for alias in t.aliases},
            groups=groups,
            settings=[saved.decode(group) for group in optimizer["groups"]],
            masters={name: values[name].float() for group in groups for name in group},
            states=states,
            steps=counters["global_steps"],
            samples=counters["global_samples"],
            skipped=counters["skipped_steps"],
            scheduler=saved.decode(saved.manifest.scheduler),
            config={"gradient_accumulation_steps": counters["gradient_accumulation_steps"]},
        )


def write(parent: str, tag: str, content: Content, stage: int, world: int, **options: Any) -> str:
    """Write `<parent>/<tag>/` and `<parent>/latest`; return the path of the checkpoint.

    Args:
        parent: directory of checkpoints.
        tag: name of this one.
        content: what is in it.
        stage: the ZeRO stage to be written.
        world: number of ranks.
        options: `legacy=True`: files that are no zip archives. Stages 1 and 2: `mappings=False`, as versions did that
            did not say where parameters lie; `align`: elements at whose multiples parameters begin; `round_robin`,
            `elastic`: as with these keys of DeepSpeed; `lean=False`: masters with their padding, as in bf16 with
            gradients accumulated in fp32. Stage 3: `sub_group`: elements of a rank after which another flat group
            begins. Experts: `ep`, ranks over which they are divided; `data_first`: ranks with the same are neighbours.
    """
    path = os.path.join(parent, tag)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(parent, "latest"), "w") as file:
        file.write(tag)
    with pretended():
        _WRITERS[stage](path, content, stage, world, **options)
    return path


def _put(value: Any, path: str, name: str, legacy: bool = False) -> None:
    torch.save(value, os.path.join(path, name), _use_new_zipfile_serialization=not legacy)


def model_states(content: Content, world: int) -> dict[str, Any]:
    """Return the file of model states of stage 0; the others change some entries."""
    return {
        "module": OrderedDict((n, value) for n, value in content.module.items() if n not in content.experts),
        "buffer_names": list(content.buffers),
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": content.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": content.skipped,
        "global_steps": content.steps,
        "global_samples": content.samples,
        "dp_world_size": world,
        "mp_world_size": content.parts,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": content.parts},
        "ds_config": {**content.config, "bf16": {"enabled": content.narrow}},
        "ds_version": VERSION,
        "num_experts": list(content.counts.values()),
        "ds_autoep_layers": None,
        **({} if content.info is None else {"universal_checkpoint_info": content.info}),
        **content.client,
    }


def divided(content: Content, regions: dict[str, list[Region]], info: Any) -> list[Content]:
    """Return what each of some model-parallel ranks has.

    Args:
        content: of all.
        regions: what each of them has of a parameter; of others all.
        info: what the files say of it.
    """
    count = len(next(iter(regions.values())))

    def own(name: str, value: Any, part: int) -> Any:
        cuts = name in regions and isinstance(value, torch.Tensor) and value.dim() == len(regions[name][part])
        return cut(value, regions[name][part]).clone() if cuts else value

    return [
        replace(
            content,
            module={name: own(name, value, part) for name, value in content.module.items()},
            masters={name: own(name, value, part) for name, value in content.masters.items()},
            states={
                name: {key: own(name, value, part) for key, value in state.items()}
                for name, state in content.states.items()
            },
            part=part,
            parts=count,
            info=info,
        )
        for part in range(count)
    ]


def affine_map(content: Content, regions: dict[str, list[Region]]) -> dict[str, Any]:
    """Return where each run of each part lies in the whole, as DeepSpeed writes it."""
    count = len(next(iter(regions.values())))
    found = {}
    for name, value in content.masters.items():
        shape = tuple(value.shape)
        own = regions.get(name, [boxes.whole(shape)] * count)
        found[f"^{re.escape(name)}$"] = {
            "logical_shape": list(shape),
            "ranks": {
                part: {
                    "shard_shape": list(boxes.sizes(region)),
                    "pieces": [
                        {**piece, "locations": [n for n in range(count) if own[n] == region]}
                        for piece in _pieces(shape, region)
                    ],
                }
                for part, region in enumerate(own)
            },
        }
    return {"version": 1, "params": found}


def _pieces(shape: tuple[int, ...], region: Region) -> Iterator[dict[str, Any]]:
    inner = boxes.sizes(region)
    if not math.prod(inner):
        return
    runs = [
        [(first, end, sum(b - a for a, b in some if a < first)) for first, end in some] for some in boxes.ranges(region)
    ]
    strides, own = ([math.prod(sizes[n + 1 :]) for n in range(len(shape))] for sizes in (shape, inner))
    for run in itertools.product(*runs):
        yield {
            "shape": [end - first for first, end, _ in run],
            "source": [sum(first * step for (first, _, _), step in zip(run, strides, strict=True)), strides],
            "dest": [sum(place * step for (_, _, place), step in zip(run, own, strict=True)), own],
        }


def _write_experts(path: str, content: Content) -> None:
    """Write each expert into its file."""
    for number, (layer, count) in enumerate(content.counts.items()):
        for expert in range(count):
            own = {n: content.module[n] for n, place in content.experts.items() if place[:2] == (layer, expert)}
            _put(own, path, f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt")


def _of_place(content: Content, group: list[str], place: int, ep: int) -> dict[str, str]:
    """Return the members of a group on a rank that has experts of one place among `ep`: name there, name in the model.

    A rank numbers its experts from 0 on.
    """
    found = {}
    for name in group:
        if name not in content.experts:
            found[name] = name
            continue
        layer, number, inside = content.experts[name]
        each = content.counts[layer] // ep
        if number // each == place:
            found[f"{layer}{number - place * each}.{inside}"] = name
    return found


def _shapes(content: Content, groups: list[list[str]]) -> list[OrderedDict[str, torch.Size]]:
    return [OrderedDict((name, content.masters[name].shape) for name in group) for group in groups]


def _write_0(
    path: str, content: Content, stage: int, world: int, legacy: bool = False, ep: int = 1, data_first: bool = False
) -> None:
    model = model_states(content, world)
    model["ds_config"]["use_data_before_expert_parallelism"] = data_first
    states = [_numbered(content, place, ep) for place in range(ep)]
    _put({**model, "optimizer": states[0]}, path, f"mp_rank_{content.part:02d}_model_states.pt", legacy)
    if content.experts:
        _write_experts(path, content)
        for place, state in enumerate(states):
            _put({"optimizer": state}, path, f"expp_rank_{place}_mp_rank_00_optim_states.pt")


def _settings(content: Content, ep: int) -> list[dict[str, Any]]:
    """Return the settings of groups; those of experts have the name of a group of ranks."""
    return [{**group, "name": f"ep_size_{ep}"} if group.get("moe") else group for group in content.settings]


def _numbered(content: Content, place: int, ep: int) -> dict[str, Any]:
    """Return the optimizer of a rank."""
    groups = [list(_of_place(content, group, place, ep).values()) for group in content.groups]
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, settings in zip(groups, _settings(content, ep), strict=True):
        numbers = list(range(len(state["state"]), len(state["state"]) + len(group)))
        state["state"].update(zip(numbers, (content.states[name] for name in group), strict=True))
        state["param_groups"].append({**settings, "params": numbers})
    if content.narrow:
        state = {
            "dynamic_loss_scale": content.scaler["dynamic"],
            **{key: content.scaler[key] for key in _SCALE if key in content.scaler},
            "optimizer_state_dict": state,
            "fp32_groups": [[content.masters[name] for name in group] for group in groups],
        }
    return state


def _scaler(content: Content) -> Any:
    return _object(DynamicLossScaler if content.scaler["dynamic"] else LossScaler, **content.scaler)


def _optimizer_file(content: Content, rank: int) -> str:
    bf16 = any(content.module[name].dtype == torch.bfloat16 for group in content.groups for name in group)
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_{content.part:02d}_optim_states.pt"


def _entries(content: Content, group: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the entries that have one value per element, and the other ones."""
    if not group or group[0] not in content.states:
        return [], {}
    found = content.states[group[0]]
    cut = [k for k, v in found.items() if isinstance(v, torch.Tensor) and k != "step"]
    return cut, {key: value for key, value in found.items() if key not in cut}


def _write_flat(
    path: str,
    content: Content,
    stage: int,
    world: int,
    *,
    mappings: bool = True,
    legacy: bool = False,
    align: int = 1,
    round_robin: bool = False,
    elastic: bool = False,
    lean: bool = True,
    ep: int = 1,
    data_first: bool = False,
) -> None:
    groups = [group[::2] + group[1::2] if round_robin else group for group in content.groups]
    first = [_of_place(content, group, 0, ep) for group in groups]
    model = model_states(content, world)
    model["param_shapes"] = [OrderedDict((n, content.masters[m].shape) for n, m in group.items()) for group in first]
    model["shared_params"] = dict(content.shared)
    model["ds_config"]["use_data_before_expert_parallelism"] = data_first
    model["ds_config"]["zero_optimization"] = {"stage": stage, "round_robin_gradients": round_robin}
    _put(model, path, f"mp_rank_{content.part:02d}_model_states.pt", legacy)
    _write_experts(path, content)
    copies = [world // ep if any(name in content.experts for name in group) else world for group in groups]
    for rank in range(world):
        masters, paddings, states, found, gaps = [], [], {}, [], []
        place, copy = divmod(rank, world // ep) if data_first else divmod(rank, ep)[::-1]
        for number, count in enumerate(copies):
            names = _of_place(content, groups[number], place, ep)
            group, part = list(names.values()), rank if count == world else copy
            gaps.append([-content.masters[name].numel() % align for name in group[:-1]] + [0])
            flat = _flat([content.masters[name] for name in group], gaps[-1])
            size = -(-flat.numel() // (2 * count)) * 2
            low, high = part * size, (part + 1) * size
            real = max(0, min(high, flat.numel()) - low)
            paddings.append(size - real)
            masters.append(_padded(flat, size * count)[low : low + real if lean else high].clone())
            told = _of_place(content, content.groups[number], place, ep)
            found.append(_fragments(content, told, gaps[-1], low, low + real))
            cut, values = _entries(content, group)
            states[number] = dict(values)
            for key in cut:
                whole = _padded(_flat([content.states[name][key] for name in group], gaps[-1]), size * count)
                states[number][key] = whole[low : low + real if elastic else high].clone()
        settings = [{**s, "params": [n]} for n, s in enumerate(_settings(content, ep))]
        inner: dict[str, Any] = {
            "clip_grad": 1.0,
            "base_optimizer_state": list(states.values()) if elastic else {"state": states, "param_groups": settings},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": copies,
            "ds_version": VERSION,
        }
        if lean:  # the others come from an optimizer that has neither a scale nor a stage
            inner.update(
                loss_scaler=_scaler(content),
                dynamic_loss_scale=content.scaler["dynamic"],
                overflow=False,
                zero_stage=ZeroStageEnum(stage),
            )
        if mappings:
            inner["param_slice_mappings"] = found
        if align > 1:
            inner["param_alignment_paddings"] = gaps
        value = {"optimizer_state_dict": inner, "ds_config": model["ds_config"], "ds_version": VERSION}
        _put(value, path, _optimizer_file(content, rank), legacy)


def _flat(values: list[torch.Tensor], gaps: list[int]) -> torch.Tensor:
    """Return tensors end to end, with gaps behind them."""
    return torch.cat([_padded(v.reshape(-1), v.numel() + gap) for v, gap in zip(values, gaps, strict=True)])


def _padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _fragments(content: Content, group: dict[str, str], gaps: list[int], low: int, high: int) -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict()
    place = 0
    for (name, whole), gap in zip(group.items(), gaps, strict=True):
        end = place + content.masters[whole].numel()
        first, last = max(place, low), min(end, high)
        if first < last:
            found[name] = _object(fragment_address, numel=last - first, start=first - low)
        place = end + gap
    return found


def _write_divided(
    path: str, content: Content, stage: int, world: int, *, sub_group: int = 10**9, legacy: bool = False
) -> None:
    subs: list[tuple[int, list[str]]] = []
    for number, group in enumerate(content.groups):
        held = sub_group
        for name in group:
            if held >= sub_group:
                subs.append((number, []))
                held = 0
            subs[-1][1].append(name)
            held += -(-content.masters[name].numel() // world)
    frozen = content.frozen
    for rank in range(world):
        model = model_states(content, world)
        empty = {id(value): value.new_zeros(0) for value in content.module.values()}
        model.update(
            module=OrderedDict(
                (name, value if name in content.buffers else empty[id(value)]) for name, value in content.module.items()
            ),
            param_shapes=_shapes(content, [names for _, names in subs]),
            frozen_param_shapes=OrderedDict((name, content.module[name].shape) for name in frozen),
            frozen_param_fragments=OrderedDict((name, _part(content.module[name], rank, world)) for name in frozen),
            shared_params=dict(content.shared) if rank == 0 else {},
        )
        _put(model, path, f"zero_pp_rank_{rank}_mp_rank_{content.part:02d}_model_states.pt", legacy)
        states: dict[int, dict[str, Any]] = {}
        flats = []
        for number, (_, names) in enumerate(subs):
            flats.append(torch.cat([_part(content.masters[name], rank, world) for name in names]))
            flats[-1].ds_id = f"{number}_{number}"
            cut, values = _entries(content, names)
            states[number] = dict(values)
            for key in cut:
                states[number][key] = torch.cat([_part(content.states[name][key], rank, world) for name in names])
        settings = [
            {**found, "params": [n for n, (owner, _) in enumerate(subs) if owner == number]}
            for number, found in enumerate(content.settings)
        ]
        inner = {
            "zero_stage": ZeroStageEnum(3),
            "loss_scaler": _scaler(content),
            "dynamic_loss_scale": content.scaler["dynamic"],
            "overflow": False,
            "partition_count": world,
            "optimizer_state_dict": {"state": states, "param_groups": settings},
            "fp32_flat_groups": flats,
        }
        value = {"optimizer_state_dict": inner, "ds_config": model["ds_config"], "ds_version": VERSION}
        _put(value, path, _optimizer_file(content, rank), legacy)


def _part(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a rank's part of a tensor that is padded to a multiple of the number of ranks."""
    size = math.ceil(value.numel() / world)
    return _padded(value.reshape(-1), size * world)[rank * size : (rank + 1) * size].clone()


_WRITERS = {0: _write_0, 1: _write_flat, 2: _write_flat, 3: _write_divided}
