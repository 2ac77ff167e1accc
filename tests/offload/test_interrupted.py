"""Disks that fail in the middle of a step or of a pass: what is said, what can be saved, and how it goes on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import CheckpointError, OffloadError, UsageError
from shardwise.memory import Category, Tier
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks
from tests.offload.settings import offload
from tests.offload.test_faults import CASE, made, masters_digest, steps


@contextlib.contextmanager
def failing(engine: Any, call: str, code: int, after: int, times: int = 1) -> Iterator[None]:
    """Let calls of the system on the engine's swap files fail, beginning with one of them."""
    files = {home._file._descriptor for home in vars(engine.sharded.homes).values() if home.tier is Tier.DISK}
    real, count = getattr(os, call), 0

    def called(descriptor: int, *args: Any) -> int | None:
        nonlocal count
        if descriptor in files:
            count += 1
            if after < count <= after + times:
                raise OSError(code, os.strerror(code))
        moved: int | None = real(descriptor, *args)
        return moved

    with mock.patch(f"os.{call}", called):
        yield


def backward(engine: Any, step: int) -> None:
    batch = CASE.data(step, 0, torch.distributed.get_rank(), torch.bfloat16)
    engine.backward(CASE.loss(engine, batch))


def undisturbed(place: str, directory: str) -> str:
    engine = made(offload(place, directory))
    steps(engine, 0, 4)
    found = masters_digest(engine)
    engine.destroy()
    return found


def disturbed(place: str, directory: str, call: str, code: int, after: int, rank: int, times: int) -> tuple[str, ...]:
    """Train as `undisturbed`, with a disk that fails in the third step; return digest and what was said."""
    engine = made(offload(place, directory))
    steps(engine, 0, 2)
    backward(engine, 2)
    here = torch.distributed.get_rank() == rank
    before = engine.sharded.accountant.live_in(Tier.HOST)[Category.BUFFERS]
    with (
        failing(engine, call, code, after if here else 1 << 30, times),
        pytest.raises(OffloadError) as error,
    ):
        engine.step()
    assert engine.global_steps == 2
    said = str(error.value)
    held = engine.sharded.accountant.live_in(Tier.HOST)[Category.BUFFERS] - before
    assert (held > 0) == (here and call == "pwritev")  # values that the disk has not taken
    saved = "saved"
    try:
        engine.save_checkpoint(f"{directory}/saved")
    except CheckpointError as refused:
        saved = str(refused)
    engine.step()
    assert engine.global_steps == 3
    steps(engine, 3, 4)
    assert engine.sharded.accountant.live_in(Tier.HOST)[Category.BUFFERS] == before
    found = masters_digest(engine)
    engine.destroy()
    return found, said, saved


def goes_on(place: str, directory: str, path: str) -> str:
    engine = made(offload(place, directory))
    engine.load_checkpoint(path)
    steps(engine, 2, 4)
    found = masters_digest(engine)
    engine.destroy()
    return found


FAULTS = [
    pytest.param("optimizer on disk", "preadv", errno.EIO, 0, 1, id="first-read"),
    pytest.param("optimizer on disk", "preadv", errno.EIO, 7, 1, id="later-read"),
    pytest.param("optimizer on disk", "pwritev", errno.ENOSPC, 2, 3, id="writes"),
    pytest.param("all on disk", "pwritev", errno.EIO, 5, 1, id="write-of-all"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("place", "call", "code", "after", "times"), FAULTS)
def test_a_step_that_a_disk_has_ended_goes_on_with_the_same_bits(
    tmp_path: Path, world: int, place: str, call: str, code: int, after: int, times: int
) -> None:
    whole = run_ranks(undisturbed, world, place, str(tmp_path))
    found = run_ranks(disturbed, world, place, str(tmp_path), call, code, after, world - 1, times)
    for rank, (bits, said, saved) in enumerate(found):
        assert bits == whole[rank]
        assert os.strerror(code) in said and "swap file" in said and f"rank {world - 1}" in said
        assert "last checkpoint" not in said and ".." not in said
        if saved == "saved":
            assert "Nothing has been stepped" in said and "save_checkpoint() saves" in said
        else:
            assert "units" in said and "have been stepped: engine.step() steps the others" in said
            assert "had been stepped when a disk failed" in saved and "Call engine.step()" in saved
    if found[0][2] == "saved":
        assert run_ranks(goes_on, world, place, str(tmp_path), str(tmp_path / "saved"))[0] == whole[0]


def in_a_pass(directory: str, where: str) -> tuple[str, str, str]:
    """Train as `undisturbed`, with disks of all ranks that fail in a pass of the third step."""
    engine = made(offload("all on disk", directory))
    steps(engine, 0, 2)
    batch = CASE.data(2, 0, torch.distributed.get_rank(), torch.bfloat16)
    loss = CASE.loss(engine, batch) if where == "backward" else None
    with failing(engine, "preadv", errno.EIO, 1), pytest.raises(OffloadError) as error:
        engine.backward(loss if loss is not None else CASE.loss(engine, batch))
    del loss
    saved = digest = ""
    try:
        engine.save_checkpoint(f"{directory}/saved")
    except UsageError as refused:
        saved = str(refused)
    else:
        engine.zero_grad()
        steps(engine, 2, 4)
        digest = masters_digest(engine)
    engine.destroy()
    return digest, str(error.value), saved


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_a_disk_has_ended_can_be_repeated_by_one_rank(tmp_path: Path, where: str) -> None:
    (whole,) = run_ranks(undisturbed, 1, "all on disk", str(tmp_path))
    ((digest, said, saved),) = run_ranks(in_a_pass, 1, str(tmp_path), where)
    assert digest == whole and os.strerror(errno.EIO) in said and not saved
    assert "engine.zero_grad() and repeat the window" in said and "last checkpoint" not in said
    assert run_ranks(goes_on, 1, "all on disk", str(tmp_path), str(tmp_path / "saved")) == [whole]


def test_where_others_wait_in_a_pass_nothing_is_begun(tmp_path: Path) -> None:
    for _, said, saved in run_ranks(in_a_pass, 2, str(tmp_path), "forward"):
        assert os.strerror(errno.EIO) in said
        assert "other ranks wait" in saved and "End the process, and go on from the last checkpoint" in saved
        assert said.endswith("The other ranks wait for this one. End the process, and go on from the last checkpoint")


def dropped(directory: str) -> tuple[str, str]:
    engine = made(offload("optimizer on disk", directory))
    steps(engine, 0, 1)
    engine.save_checkpoint(f"{directory}/saved")
    expected = masters_digest(engine)
    backward(engine, 1)
    with failing(engine, "preadv", errno.EIO, 7), pytest.raises(OffloadError):
        engine.step()
    engine.zero_grad()
    with pytest.raises(CheckpointError) as unsaved:
        engine.save_checkpoint(f"{directory}/other")
    backward(engine, 1)
    with pytest.raises(UsageError) as refused:
        engine.step()
    engine.load_checkpoint(f"{directory}/saved")
    assert masters_digest(engine) == expected
    steps(engine, 1, 2)
    engine.destroy()
    return str(unsaved.value), str(refused.value)


def test_half_a_step_without_its_gradients_is_not_trained_on(tmp_path: Path) -> None:
    ((unsaved, refused),) = run_ranks(dropped, 1, str(tmp_path))
    assert "gradients have been dropped" in unsaved and str(tmp_path / "saved") in unsaved
    assert "gradients have been dropped" in refused and "load a checkpoint" in refused


def saved_by_itself(directory: str, after: int) -> list[str]:
    engine = made(offload("optimizer on disk", directory))
    engine.checkpoint_on_signal(f"{directory}/saved")
    steps(engine, 0, 2)
    backward(engine, 2)
    here = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with failing(engine, "preadv", errno.EIO, after if here else 1 << 30), pytest.raises(OffloadError):
        engine.step()
    engine.destroy()
    return sorted(os.listdir(f"{directory}/saved")) if os.path.exists(f"{directory}/saved") else []


@pytest.mark.parametrize(("world", "after"), [(1, 0), (1, 7), (2, 0)])
def test_with_a_directory_for_signals_what_is_whole_is_saved(tmp_path: Path, world: int, after: int) -> None:
    # Another rank has stepped all of its units before it learns of the error.
    expected = [] if after or world > 1 else ["global_step2", "latest"]
    assert run_ranks(saved_by_itself, world, str(tmp_path), after) == [expected] * world
    if expected:
        whole = run_ranks(undisturbed, world, "optimizer on disk", str(tmp_path))[0]
        assert run_ranks(goes_on, world, "optimizer on disk", str(tmp_path), str(tmp_path / "saved"))[0] == whole


# -- norms of gradients, and optimizers for which ranks exchange values in their step ----------------------------------


class Momentum(torch.optim.Optimizer):
    """An optimizer that says nothing of itself, so that it gets whole tensors."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["velocity"] / state["velocity"].norm().clamp(min=1e-3), alpha=group["lr"])


def of_kind(kind: str, place: str, directory: str, precision: str) -> Any:
    """Make an engine whose optimizer is of a kind."""
    from shardwise.optim import Lamb, Muon
    from tests.zero.test_layerwise import MUON, by_dimensions
    from tests.zero.training import Setting, make_optimizer, start

    zero = tuple(offload(place, directory).items()) if place else ()
    setting = Setting(3, precision=precision, clip=0.5, lr=1e-2, zero=zero)
    model = CASE.make()
    groups = CASE.groups(model)
    made = {
        "AdamW": lambda: make_optimizer("AdamW", groups, 1e-2),
        "Lamb": lambda: Lamb(groups, lr=1e-2),
        "Muon": lambda: Muon(by_dimensions(groups), **MUON),
        "foreign": lambda: Momentum(groups, lr=1e-2),
    }
    return start(CASE, setting, model, made[kind]())


def pass_of(engine: Any, step: int, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine.backward(CASE.loss(engine, CASE.data(step, 0, torch.distributed.get_rank(), dtype)))


Moment = tuple[str, int, int]
"""A call of the system in a step, the number of those that go well before, and the step."""


def of_a_kind(kind: str, place: str, directory: str, precision: str, moment: Moment | None, rank: int) -> Any:
    """Take four steps, one of which the disk of a rank interrupts; return a digest, what was said, and what it read."""
    engine = of_kind(kind, place, directory, precision)
    said, saved = "", ""
    call, after, failing_step = moment or ("preadv", 0, -1)
    for step in range(4):
        pass_of(engine, step, precision)
        if step == failing_step:
            here = torch.distributed.get_rank() == rank
            with failing(engine, call, errno.EIO, after if here else 1 << 30), pytest.raises(OffloadError) as error:
                engine.step()
            said = str(error.value)
            assert engine.global_steps == step
            try:
                engine.save_checkpoint(f"{directory}/saved")
            except CheckpointError as refused:
                saved = str(refused)
            if call == "pwritev" and not saved:  # in the middle of scaling
                with pytest.raises(UsageError, match=r"unscaled and clipped. Call engine.step\(\) again"):
                    safe_get_full_grad(next(engine.module.parameters()))
        engine.step()
    assert engine.global_steps == 4
    norm = float(engine.get_global_grad_norm())
    found = masters_digest(engine), norm, str(engine.last_step.loss_scale)
    engine.destroy()
    return found, said, saved


KINDS = [
    pytest.param("AdamW", "gradients on disk", "bf16", ("preadv", 0, 2), id="norm-first"),
    pytest.param("AdamW", "gradients on disk", "fp16", ("preadv", 2, 2), id="norm-later"),
    pytest.param("foreign", "all on disk", "fp32", ("preadv", 1, 2), id="norm-of-foreign"),
    pytest.param("Lamb", "optimizer on disk", "fp32", ("preadv", 3, 2), id="lamb-read"),
    pytest.param("Lamb", "all on disk", "bf16", ("pwritev", 2, 1), id="lamb-write"),
    pytest.param("Muon", "optimizer on disk", "bf16", ("preadv", 3, 2), id="muon-read"),
    pytest.param("Muon", "all on disk", "bf16", ("pwritev", 9, 2), id="muon-write"),
    pytest.param("foreign", "all on disk", "bf16", ("pwritev", 1, 2), id="scaling-write"),
    pytest.param("foreign", "optimizer on disk", "fp32", ("pwritev", 1, 2), id="foreign-write"),
    pytest.param("foreign", "optimizer on disk", "fp32", ("posix_fallocate", 1, 0), id="foreign-space"),
    pytest.param("Muon", "all on disk", "bf16", ("posix_fallocate", 0, 0), id="muon-space"),
    pytest.param("AdamW", "all on disk", "bf16", ("posix_fallocate", 2, 0), id="space"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "place", "precision", "moment"), KINDS)
def test_a_step_of_any_optimizer_goes_on_with_the_same_bits(
    tmp_path: Path, world: int, kind: str, place: str, precision: str, moment: Moment
) -> None:
    whole = run_ranks(of_a_kind, world, kind, "", str(tmp_path), precision, None, 0)
    found = run_ranks(of_a_kind, world, kind, place, str(tmp_path), precision, moment, world - 1)
    for rank, (bits, said, saved) in enumerate(found):
        assert bits == whole[rank][0]
        assert f"rank {world - 1}" in said and os.strerror(errno.EIO) in said
        untouched = "Nothing has been stepped: engine.step() tries again" in said
        assert untouched == (not saved)
        assert untouched or ("have been stepped: engine.step()" in said and "Call engine.step()" in saved)
