"""`engine.refresh()`: changes of the model between steps, with all state; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import assert_close, config_of, parameters_digest

ROWS = 4
WIDTH = 24


class Adapted(nn.Module):
    """A layer with an adapter of rank 2; the layer's parameters get other names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Model(nn.Module):
    """Embedding, three layers, of which the first is frozen, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (ROWS,), generator=generator), torch.randint(5, (ROWS,), generator=generator)


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens, labels = batch(step, rank)
    return F.cross_entropy(model(tokens).float(), labels)


def unfreeze(model: Any) -> None:
    model.layers[0].requires_grad_(True)


def freeze(model: Any) -> None:
    model.embedding.requires_grad_(False)


def adapt(model: Any) -> None:
    torch.manual_seed(7)
    model.layers[1].requires_grad_(False)
    model.layers[1] = Adapted(model.layers[1])


def resize(model: Any) -> None:
    """Replace the embedding by a larger one, as scripts that add tokens do."""
    torch.manual_seed(8)
    larger = nn.Embedding(13, WIDTH)
    old = model.embedding.weight
    with shardwise.zero.GatheredParameters(old, modifier_rank=None), torch.no_grad():
        larger.weight[:11] = old
    model.embedding = larger


def resize_in_place(model: Any) -> None:
    """Give the parameter other data, as `resize_token_embeddings` of transformers does."""
    torch.manual_seed(8)
    larger = torch.randn(13, WIDTH)
    old = model.embedding.weight
    with shardwise.zero.GatheredParameters(old, modifier_rank=None), torch.no_grad():
        larger[:11] = old
        old.data = larger
    model.embedding.num_embeddings = 13


CHANGES: dict[str, list[Callable[[Any], None]]] = {
    "freezing": [unfreeze, freeze],
    "adapter": [adapt],
    "resizing": [resize, unfreeze],
    "resizing in place": [resize_in_place],
    "embedding": [freeze],
}


def configured(stage: int, optimizer: str, **more: Any) -> dict[str, Any]:
    params = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-2, "weight_decay": 0.1}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": params["lr"]}}
    return config_of(stage, {"type": optimizer, "params": params}, rows=ROWS, scheduler=schedule, **more)


def begin(stage: int, optimizer: str = "AdamW", **more: Any) -> Any:
    return shardwise.initialize(model=Model(), config=configured(stage, optimizer, **copy.deepcopy(more)))[0]


def train(engine: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()


def changed(
    stage: int, name: str, optimizer: str, more: dict[str, Any], folder: str
) -> tuple[str, dict[str, Any], str]:
    """Train, change the model, and train on: fingerprint and values at the end, fingerprint of a resumed run."""
    engine = begin(stage, optimizer, **more)
    train(engine, 0, 3)
    for number, change in enumerate(CHANGES[name]):
        change(engine.module)
        found = engine.refresh()
        assert any(found)
        assert not any(engine.refresh())  # nothing has changed since
        train(engine, 3 + number, 1)
    assert engine.global_steps == 3 + len(CHANGES[name])
    engine.save_checkpoint(f"{folder}/{stage}", tag="a")
    train(engine, 5, 3)
    end = parameters_digest(engine.module), engine.module_state_dict()
    engine.destroy()
    other = Model()
    for change in CHANGES[name]:
        change(other)
    again = shardwise.initialize(model=other, config=configured(stage, optimizer, **copy.deepcopy(more)))[0]
    again.load_checkpoint(f"{folder}/{stage}", "a")
    train(again, 5, 3)
    resumed = parameters_digest(again.module)
    return *end, resumed


def plain(name: str, optimizer: str) -> dict[str, torch.Tensor]:
    """The same with plain PyTorch in one process."""
    model, peak = Model(), 0.1 if optimizer == "SGD" else 1e-2
    settings: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {"weight_decay": 0.1}
    stepped = getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], lr=peak, **settings)
    schedule = shardwise.schedules.WarmupLR(stepped, 0.0, peak, 4)

    def steps(first: int, count: int) -> None:
        for step in range(first, first + count):
            (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
            stepped.step()
            schedule.step()
            model.zero_grad(set_to_none=True)

    steps(0, 3)
    for number, change in enumerate(CHANGES[name]):
        change(model)
        if change is resize_in_place:
            del stepped.state[model.embedding.weight]
        stepped.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        steps(3 + number, 1)
    steps(5, 3)
    return {key: value.detach() for key, value in model.state_dict().items()}


OTHERS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
}


@pytest.mark.parametrize(
    ("name", "optimizer", "kind", "stages"),
    [
        ("adapter", "SGD", "", (1, 3)),
        ("resizing", "AdamW", "", (0, 3)),
        ("freezing", "AdamW", "bf16", (3,)),
        ("freezing", "AdamW", "offloaded", (3,)),
        *(thorough(name, o, "", range(4)) for name in CHANGES if name != "embedding" for o in ("SGD", "AdamW")),
        *(thorough("freezing", "AdamW", kind, (1, 3)) for kind in ("bf16", "fp16")),
        thorough("embedding", "Muon", "", (1, 3)),  # which makes its groups from shapes
    ],
)
def test_training_goes_on_at_every_stage(
    name: str, optimizer: str, kind: str, stages: Iterable[int], tmp_path: Path
) -> None:
    """As in plain PyTorch; in other precisions, in other places and of whole tensors alike at all stages."""
    wanted = None if kind or optimizer == "Muon" else plain(name, optimizer)
    digests = set()
    for stage in stages:
        for digest, values, resumed in run_ranks(changed, 2, stage, name, optimizer, OTHERS[kind], str(tmp_path)):
            digests.add(digest)
            assert resumed == digest
            if wanted is not None:
                assert_close(values, wanted, 1e-5, f"stage {stage}")
    assert len(digests) == 1


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_a_refreshed_engine_holds_no_more_than_a_new_one(stage: int) -> None:
    found = []
    for early in (False, True):
        model = Model()
        model.layers[0].requires_grad_(early)
        engine = shardwise.initialize(model=model, config=configured(stage, "AdamW"))[0]
        if not early:
            train(engine, 0, 1)
            unfreeze(engine.module)
            engine.refresh()
        train(engine, 1, 2)
        engine.sharded.finish_gathers()
        live = engine.accountant.live
        # Segments with step counts of their own have counts of their own.
        live[Category.OPTIMIZER] -= sum(state["step"].nbytes for state in engine.optimizer.state.values())
        found.append(live)
        engine.destroy()
    assert found[0] == found[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_change_nothing() -> None:
    engine = begin(3)
    before = parameters_digest(engine.module)
    engine.backward(loss_of(engine, 0, dist.get_rank()))
    with pytest.raises(UsageError, match="gradients of an unfinished accumulation window"):
        engine.refresh()
    engine._step.drop_gradients()
    if dist.get_rank() == 0:
        unfreeze(engine.module)
    with pytest.raises(UsageError, match="the ranks have changed their models differently"):
        engine.refresh()
    engine.module.layers[0].requires_grad_(False)
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match=r"the model has no such parameters \(shapes \[\(3,\)\]\)"):
        engine.refresh(param_groups=[{"params": [stranger]}])
    unfreeze(engine.module)
    with pytest.raises(UsageError, match="WarmupLR has learning rates of the present groups"):
        engine.refresh(param_groups=[{"params": list(engine.module.layers[0].parameters())}])
    with pytest.raises(CheckpointError, match=r"engine.refresh\(\): .* File exists"):
        engine.refresh(directory=__file__)
    assert parameters_digest(engine.module) == before
    engine.refresh()
    train(engine, 1, 1)
    resize_in_place(engine.module)
    with pytest.raises(UsageError, match=r"'embedding.weight' was \(11, 24\) .* and is \(13, 24\) now .*refresh\(\)"):
        train(engine, 2, 1)
    assert engine.refresh().added == ("embedding.weight",)
    train(engine, 2, 1)
    engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        engine.refresh()


@on_ranks(2)
def test_groups_of_new_parameters() -> None:
    model = Model()
    groups = [{"params": list(model.head.parameters())}, {"params": [model.embedding.weight], "lr": 0.5}]
    groups[0]["params"] += [p for layer in model.layers[1:] for p in layer.parameters()]
    config = configured(2, "SGD")
    del config["scheduler"], config["optimizer"]
    engine = shardwise.initialize(model=model, optimizer=torch.optim.SGD(groups, lr=0.1), config=config)[0]
    train(engine, 0, 1)
    unfreeze(model)
    with pytest.raises(UsageError, match=r"(?s)none has these parameters: layers.0.weight.*param_groups=\["):
        engine.refresh()
    engine.optimizer.add_param_group({"params": list(model.layers[0].parameters())})
    with pytest.raises(UsageError, match=r"has 3 parameter groups, and had 2 .*param_groups\[2:\]"):
        engine.refresh()
    del engine.optimizer.param_groups[2:]
    engine.refresh(param_groups=[{"params": list(model.layers[0].parameters()), "lr": 0.0}])
    before = engine.module_state_dict()
    train(engine, 1, 1)
    after = engine.module_state_dict()
    assert torch.equal(before["layers.0.weight"], after["layers.0.weight"])  # its learning rate is 0
    assert not torch.equal(before["layers.1.weight"], after["layers.1.weight"])
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.5, 0.0]


@on_ranks(2)
def test_state_that_would_be_lost_is_refused() -> None:
    engine = begin(1, "OneBitAdam")
    unfreeze(engine.module)
    with pytest.raises(UsageError, match="keeps errors of what each rank has sent"):
        engine.refresh()
