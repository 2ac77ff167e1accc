"""Writes DeepSpeed 0.19's layer files and universal checkpoints, with torch alone.

The forms were read off files that DeepSpeed and its converter `ds_to_universal` had written: a PipelineModule with two
stages of two ranks at ZeRO stages 0 and 1, plain models at stages 1 to 3.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.formats.deepspeed.layer_files import numbers_of, stage_name
from tests.checkpoint import deepspeed_files as files


def stages_of(content: files.Content, ends: Sequence[int], tied: dict[str, int]) -> list[files.Content]:
    """Return the content of each stage; `ends` are the layers behind its last, `tied` the first layer of each key.

    The first and the last stage have the shared modules.
    """
    found, first = [], 0
    for part, end in enumerate(ends):
        layers = {layer for layer in range(first, end) if layer not in tied.values()}
        shared = part in (0, len(ends) - 1)
        own = {
            name: new
            for name in content.module
            for new in [stage_name(name, tied)]
            if (new.startswith("tied_modules") and shared) or numbers_of([new]) & layers
        }
        own = dict(sorted(own.items(), key=lambda names: not names[1].startswith("tied_modules")))
        found.append(
            replace(
                content,
                module={new: content.module[name] for name, new in own.items()},
                buffers=[own[name] for name in content.buffers if name in own],
                groups=[[new for name, new in own.items() if name in group] for group in content.groups],
                masters={own[name]: value for name, value in content.masters.items() if name in own},
                states={own[name]: value for name, value in content.states.items() if name in own},
                part=part,
                parts=len(ends),
            )
        )
        first = end
    return found


def edit(path: str | Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a file."""
    with files.pretended():
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


def write_layers(
    parent: str,
    tag: str,
    content: files.Content,
    ends: Sequence[int],
    stage: int,
    world: int,
    *,
    tied: dict[str, int] | None = None,
    named: bool = True,
) -> str:
    """Write a checkpoint with layer files; `named=False`: in the form of bf16, whose model states have no names."""
    tied = tied or {}
    stages = stages_of(content, ends, tied)
    path = os.path.join(parent, tag)
    for part, own in enumerate(stages):
        files.write(parent, tag, own, stage, world, **({} if stage == 0 else {"lean": named}))

        def change(value: Any) -> None:
            value.update(module=None, shared_params={}, num_experts=[])
            value["checkpoint_parallel_dimensions"] = {"pp_degree": len(ends), "tp_degree": 1}
            if not named:
                value.update(param_shapes=None, optimizer={"clip_grad": 1.0})

        edit(os.path.join(path, f"mp_rank_{part:02d}_model_states.pt"), change)
    for layer in sorted({int(name.split(".")[1]) for name in content.module}):
        prefix = f"layers.{layer}."
        held = OrderedDict((n.removeprefix(prefix), v) for n, v in content.module.items() if n.startswith(prefix))
        torch.save(held, os.path.join(path, f"layer_{layer:02d}-model_states.pt"))
    return path


def write_universal(
    parent: str,
    tag: str,
    content: files.Content,
    stage: int,
    world: int = 2,
    *,
    ends: Sequence[int] = (),
    tied: dict[str, int] | None = None,
) -> str:
    """Write a universal checkpoint as `ds_to_universal` does, from one of a ZeRO stage; `ends` as in `stages_of`."""
    path = os.path.join(parent, tag)
    stages = stages_of(content, ends, tied or {}) if ends else [content]
    settings = [{**group, "params": [n]} for n, group in enumerate(content.settings)]
    for own in stages:
        files.write(parent, tag, own, stage, world)
        for name in os.listdir(path):
            if "optim_states" in name:
                os.remove(os.path.join(path, name))
            elif ends and name == f"mp_rank_{own.part:02d}_model_states.pt":
                degrees = {"pp_degree": len(ends), "tp_degree": 1}
                facts = {"module": None, "checkpoint_parallel_dimensions": degrees}
                edit(os.path.join(path, name), lambda value, facts=facts: value.update(facts))
        for name, master in own.masters.items():
            folder = os.path.join(path, "zero", name)
            os.makedirs(folder, exist_ok=True)
            for entry, value in [("fp32", master), *own.states[name].items()]:
                if entry == "step" and stage == 3:
                    continue
                made = value if entry == "step" else value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}
                torch.save(made, os.path.join(folder, f"{entry}.pt"))
        for name in [] if ends or stage == 3 else [*own.frozen, *own.buffers, *own.shared]:
            folder = os.path.join(path, "zero", name)
            os.makedirs(folder, exist_ok=True)
            torch.save({"param": own.module[name]}, os.path.join(folder, "fp32.pt"))
    state: dict[str, Any] = {"zero_stage": files.ZeroStageEnum(stage), "param_groups": settings, "ds_version": "0.19.8"}
    if stage == 3:
        steps = {n: {"step": content.states[group[0]]["step"]} for n, group in enumerate(content.groups)}
        state["optimizer_state_dict"] = {"state": steps, "param_groups": settings}
    with files.pretended():
        torch.save(state, os.path.join(path, "zero", "optimizer_state.pt"))
    os.remove(os.path.join(parent, "latest"))
    with open(os.path.join(parent, "latest_universal"), "w") as file:
        file.write(tag)
    return path
