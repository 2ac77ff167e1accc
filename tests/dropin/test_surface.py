"""Each public name of DeepSpeed's modules and engine is served, or says why it is not.

`surface.json` lists the functions and classes that the modules of DeepSpeed 0.14.4 and 0.19.8 define, and the members
of its engine.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import AbsentAttributeError, AbsentNameError

SURFACE: dict[str, Any] = json.loads((Path(__file__).parent / "surface.json").read_text())
pytestmark = pytest.mark.usefixtures("installed")


def test_every_name_of_a_module_can_be_imported_or_says_why_not() -> None:
    missing = []
    for path, names in SURFACE["modules"].items():
        for name in names:
            try:
                getattr(importlib.import_module(path), name)
            except AbsentNameError:
                continue
            except (AttributeError, ImportError) as error:
                missing.append(f"{path}.{name}: {error}")
    assert not missing


def test_every_member_of_the_engine_is_there_or_says_why_not() -> None:
    import deepspeed

    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    missing = []
    for name in SURFACE["engine"]:
        try:
            getattr(engine, name)
        except AbsentAttributeError as error:
            assert f"engine.{name} is not in shardwise" in str(error)
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    engine.destroy()
    assert not missing


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_members_of_the_optimizer(stage: int) -> None:
    import deepspeed

    fp16 = {"enabled": True, "initial_scale_power": 7}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "fp16": fp16,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer.backward(engine(torch.ones(2, 4).half()).float().mean())
    optimizer.update_master_grads()
    engine.step()
    assert optimizer.loss_scale == optimizer.cur_scale == optimizer.get_loss_scale() == 128
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == 128 and optimizer.dynamic_loss_scale
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25 == engine.get_lr()[0]
    if stage < 3:
        model.weight.data.fill_(2.0)
        optimizer.reload_model_params()
        engine.backward(engine(torch.zeros(2, 4).half()).float().mean())
        engine.step()
        assert torch.equal(model.weight.detach(), torch.full_like(model.weight, 2.0))
    assert not hasattr(optimizer, "bit16_groups")
    with pytest.raises(AttributeError, match=r"fp32_groups_flat is not in shardwise .*safe_get_full_fp32_param"):
        _ = optimizer.fp32_groups_flat
    engine.destroy()
    assert not hasattr(optimizer, "loss_scale")
    assert not hasattr(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), "loss_scale")


def test_members_of_the_loader_and_names_of_saving(tmp_path: Path) -> None:
    import deepspeed

    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    loader.data_sampler.set_epoch(1)
    assert loader.data_sampler is loader.sampler and loader.num_local_io_workers == 0 and loader.collate_fn is None
    assert engine.store_checkpoint(str(tmp_path)) and list(tmp_path.iterdir())
    with pytest.raises(AttributeError, match=r"_get_ckpt_name is not in .*engine\.save_checkpoint"):
        engine._get_ckpt_name("dir", "tag")
    with pytest.raises(AttributeError, match=r"engine\.grid is not in .*only the engine of a pipeline"):
        _ = engine.grid
    engine.destroy()
