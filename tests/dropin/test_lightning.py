"""Lightning's Trainer and Fabric with their DeepSpeedStrategy, which finds shardwise: the numbers of their own DDP.

The strategy accepts CUDA devices only. It asks whether the accelerator is a `CUDAAccelerator`, and whether the numbers
of the devices are those of the local ranks. Both packages take an accelerator of one's own: here it is a subclass whose
devices are "cpu:0", "cpu:1" and so on. Nothing of Lightning is patched, and the strategy is its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint
from shardwise.zero.units.released import is_released
from tests.dropin.clients import MISSING, Ranks, mean_over_ranks, on_clients
from tests.harness import thorough
from tests.harness.pool import RankFailure

ABSENT = [*MISSING, *(["lightning"] if find_spec("lightning") is None else [])]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")


def accelerator(package: Any) -> Any:
    """What a CUDAAccelerator of `lightning.fabric` or `lightning.pytorch` is, on CPU ranks."""

    class OnCPU(package.accelerators.CUDAAccelerator):  # type: ignore[misc,name-defined]
        def setup_device(self, device: torch.device) -> None:
            assert device.type == "cpu"

        def setup(self, trainer: Any) -> None:
            """There is no CUDA device to prepare."""

        def teardown(self) -> None:
            """And none to leave."""

        @staticmethod
        def parse_devices(devices: int) -> int:
            return devices

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("cpu", number) for number in range(devices)]

        @staticmethod
        def is_available() -> bool:
            return True

    return OnCPU()


def network(width: int = 16) -> nn.Module:
    """The same network each time it is called, with a frozen layer."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    made[2].requires_grad_(False)
    return made


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()


# -- Fabric ------------------------------------------------------------------------------------------------------------


def fabric(stage: int | None, precision: str = "32-true", **options: Any) -> Any:
    """A launched Fabric; without a stage with Lightning's DDP."""
    import lightning
    from lightning.fabric.strategies import DeepSpeedStrategy

    if stage is None:
        made = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    else:
        strategy = DeepSpeedStrategy(stage=stage, **options)
        strategy.config["gradient_clipping"] = 0.5
        made = lightning.Fabric(
            accelerator=accelerator(lightning.fabric), devices=2, strategy=strategy, precision=precision
        )
    made.launch()
    assert made.world_size == 2
    return made


def with_fabric(
    directory: str, stage: int | None, precision: str = "32-true", micro: int = 1
) -> tuple[list[float], list[float], list[float]]:
    """Losses of a few steps, those after a save, and those after going back to it."""
    runner = fabric(stage, precision)
    with runner.init_module():
        model = network()
    assert all(is_released(parameter) for parameter in model.parameters()) == (stage == 3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = runner.setup(model, optimizer)
    batches = list(runner.setup_dataloaders(torch.utils.data.DataLoader(rows(64 * micro), batch_size=4)))

    def steps(begin: int) -> list[float]:
        drawn, losses = iter(batches[begin * micro :]), []
        for _ in range(4):
            for _ in range(micro):
                loss = loss_of(model, next(drawn)) / micro
                runner.backward(loss)
                losses.append(mean_over_ranks(loss))
            if stage is None:
                runner.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    first = steps(0)
    state = {"model": model, "optimizer": optimizer, "epoch": 7}
    if stage is None:
        return first, steps(4), []
    runner.save(f"{directory}/saved", state)
    after = steps(4)
    state["epoch"] = 0
    assert runner.load(f"{directory}/saved", state) is not None and state["epoch"] == 7
    again = steps(4)
    engine = runner.strategy.model
    assert isinstance(engine, shardwise.Engine) and engine.global_steps == 8
    engine.destroy()
    return first, after, again


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "stages"), [(2, (3,)), thorough(2, (1,)), thorough(1, (0, 1, 2))])
def test_fabric(ranks: Ranks, tmp_path: Path, micro: int, stages: tuple[int, ...]) -> None:
    """With one backward pass before each step, and with two, as Fabric's scripts accumulate."""
    plain = ranks(with_fabric, 2, str(tmp_path), None, "32-true", micro)
    for stage in stages:
        found = ranks(with_fabric, 2, f"{tmp_path}/{stage}", stage, "32-true", micro)
        for (first, after, again), (expected, later, _) in zip(found, plain, strict=True):
            assert first == pytest.approx(expected, rel=1e-5) and after == pytest.approx(later, rel=1e-5)
            assert again == after


@pytest.mark.parametrize("precision", ["bf16-true", thorough("bf16-mixed")])
@on_clients(2)
def test_fabric_in_bf16(tmp_path: Path, precision: str) -> None:
    first, after, again = with_fabric(str(tmp_path), 3, precision)
    assert after == again and after[-1] < first[0]


# -- Trainer -----------------------------------------------------------------------------------------------------------


def module(**options: Any) -> Any:
    """A LightningModule that builds its network where Lightning would have it sharded, and notes its losses."""
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net: Any = None
            self.losses: list[float] = []
            self.rates: list[float] = []

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network(self.hparams.width)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = loss_of(self, batch)
            self.losses.append(mean_over_ranks(loss))
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return loss

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("validated", loss_of(self, batch), sync_dist=True)

        def test_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("tested", loss_of(self, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Regression(**options)


def trainer(directory: str, stage: int | None, **options: Any) -> Any:
    """A Trainer that accumulates, clips and saves after each epoch; without a stage with Lightning's DDP."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy

    place: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp"}
    if stage is not None:
        place = {"accelerator": accelerator(lightning.pytorch), "strategy": DeepSpeedStrategy(stage=stage, **options)}
    return lightning.Trainer(
        devices=2,
        max_epochs=2,
        default_root_dir=directory,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)],
        **place,
    )


def loader(count: int) -> Any:
    return torch.utils.data.DataLoader(rows(count), batch_size=4)


def metric_of(directory: str, stage: int | None, path: str | None = None, **options: Any) -> float:
    """The test metric of a new Trainer and module, by the weights of a checkpoint."""
    ran = trainer(directory, stage, **options)
    found = ran.test(module(), loader(16), ckpt_path=path, verbose=False)[0]["tested"]
    leave(ran)
    return float(found)


def leave(ran: Any) -> None:
    if isinstance(ran.strategy.model, shardwise.Engine):
        ran.strategy.model.destroy()


def with_trainer(directory: str, stage: int | None) -> dict[str, Any]:
    """Fit, validate, test, go on from the middle, and take the weights out."""
    ran, first = trainer(directory, stage), module()
    ran.fit(first, loader(48), loader(16))
    if stage is not None:
        assert isinstance(ran.strategy.model, shardwise.Engine) and ran.strategy.model.lr_scheduler is None
        assert ran.strategy.model.zero_optimization_stage() == stage
    found: dict[str, Any] = {
        "losses": first.losses,
        "rates": first.rates,
        "fitted": float(ran.callback_metrics["validated"]),
        "validated": ran.validate(first, loader(16), verbose=False)[0]["validated"],
        "tested": ran.test(first, loader(16), verbose=False)[0]["tested"],
    }
    leave(ran)
    again, resumed = trainer(f"{directory}/again", stage), module()
    again.fit(resumed, loader(48), loader(16), ckpt_path=f"{directory}/epoch=0.ckpt")
    leave(again)
    found["resumed"] = (resumed.losses, resumed.rates)
    found["loaded"] = metric_of(directory, stage, f"{directory}/epoch=1.ckpt")
    if stage is not None:
        found["single"] = taken_out(directory, stage)
        found["elsewhere"] = metric_of(directory, 3 if stage < 3 else 1, f"{directory}/epoch=1.ckpt")
    return found


def taken_out(directory: str, stage: int) -> list[float]:
    """Metrics of one file that Lightning has made of a checkpoint: on plain DDP, and by the strategy."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    single = f"{directory}/single.ckpt"
    if torch.distributed.get_rank() == 0:
        content = convert_zero_checkpoint_to_fp32_state_dict(f"{directory}/epoch=1.ckpt", single)
        assert content["hyper_parameters"] == {"width": 16} and content["epoch"] == 1
        with Checkpoint(f"{directory}/epoch=1.ckpt/checkpoint") as saved:
            values = saved.module_values()
        assert content["state_dict"].keys() == values.keys()
        assert all(torch.equal(content["state_dict"][name], value) for name, value in values.items())
    torch.distributed.barrier()
    found = [metric_of(directory, None, single)]
    if stage == 3:
        found.append(metric_of(directory, stage, single, load_full_weights=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_clients(2)
def test_trainer(tmp_path: Path, stage: int) -> None:
    plain, ours = with_trainer(f"{tmp_path}/ddp", None), with_trainer(f"{tmp_path}/ours", stage)
    assert len(plain["losses"]) == 12 and plain["rates"][-1] < plain["rates"][0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5) and ours["rates"] == plain["rates"]
    for metric in ("fitted", "validated", "tested", "loaded"):
        assert ours[metric] == pytest.approx(plain[metric], rel=1e-5)
    for found in (plain, ours):
        assert found["loaded"] == found["tested"] and found["validated"] == found["fitted"]
    assert ours["resumed"] == (ours["losses"][6:], ours["rates"][6:])
    assert ours["elsewhere"] == pytest.approx(ours["tested"], rel=1e-6)
    assert ours["single"] == pytest.approx([ours["tested"]] * len(ours["single"]), rel=1e-6)


def summary() -> tuple[list[int], int, int]:
    """What Lightning's table says at stage 3: elements of this rank by layer, all, and those that train."""
    import lightning
    from lightning.pytorch.utilities.model_summary import DeepSpeedSummary

    found = []

    class Looking(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            table = DeepSpeedSummary(pl_module, max_depth=1)
            assert "Params per Device" in str(table)
            found.append((table.parameters_per_layer, table.total_parameters, table.trainable_parameters))

    ran = trainer("unused", 3)
    ran.callbacks.append(Looking())
    ran.strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # none is kept whole
    ran.fit_loop.max_epochs = 0
    ran.fit(module(width=32), loader(16))
    assert deepspeed_checkpointing_is_configured()
    leave(ran)
    return found[0]


def deepspeed_checkpointing_is_configured() -> bool:
    """Whether the strategy has called `configure`, which it does for its default configuration."""
    from deepspeed import checkpointing

    return bool(checkpointing.is_configured())


def test_model_summary(ranks: Ranks) -> None:
    (first, total, trained), (second, *_) = ranks(summary, 2)
    sizes = [parameter.numel() for parameter in network(32).parameters()]
    frozen = sum(parameter.numel() for parameter in network(32)[2].parameters())
    assert total == sum(sizes) and trained == total - frozen
    assert first[0] < total and second[0] < total and first[0] + second[0] == total


BOTH = {"offload_optimizer": True, "offload_parameters": True}
DISK = {"offload_optimizer_device": "nvme", "offload_params_device": "nvme", "nvme_path": "the test's directory"}


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        thorough(2, [{}, {"offload_optimizer": True}]),
        thorough(3, [{}, {**BOTH, "remote_device": "cpu"}]),
        (3, [{}, {**BOTH, **DISK, "remote_device": "nvme"}]),
    ],
    ids=["optimizer", "both", "disk"],
)
@on_clients(2)
def test_offload(tmp_path: Path, stage: int, kinds: list[dict[str, Any]]) -> None:
    """Losses without offload and with it; the second epoch is resumed."""
    found = []
    for name, options in enumerate(kinds):
        if "nvme_path" in options:
            options["nvme_path"] = str(tmp_path)
        ran, fitted = trainer(f"{tmp_path}/{name}", stage, **options), module()
        ran.fit_loop.max_epochs = 1
        ran.strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # none is kept whole
        ran.fit(fitted, loader(32))
        leave(ran)
        again, resumed = trainer(f"{tmp_path}/{name}", stage, **options), module()
        again.fit(resumed, loader(32), ckpt_path=f"{tmp_path}/{name}/epoch=0.ckpt")
        leave(again)
        found.append([*fitted.losses, *resumed.losses])
    assert len(found[0]) == 8 and found[0] == found[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def on_a_cpu() -> None:
    import lightning

    strategy = lightning.pytorch.strategies.DeepSpeedStrategy(stage=2)
    lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy).fit(module(), loader(8))


def test_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="only supported on CUDA GPUs") as error:
        ranks(on_a_cpu, 2)
    assert isinstance(error.value.__cause__, RuntimeError)
