"""Copies of the state in memory: restored to the bit, on lost nodes too; bounded, checked, and never in the way."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Manifest, Slice, StoredTensor
from shardwise.checkpoint import save as module
from shardwise.checkpoint.peer_replicas import needed_files
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.transfer import FileTransfer, exchange_files
from shardwise.comm.environment import MEMORY_DIRECTORY
from shardwise.engine import faults
from shardwise.engine.background import saved_bytes
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from shardwise.memory import Category
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import Run, barrier, config, differences, first_rank, rank
from tests.harness import on_ranks, run_ranks, thorough


@contextmanager
def as_node(directory: str) -> Iterator[None]:
    """Let this rank keep its copies there, as if the launcher of its node had said so, in a job that begins anew."""
    before = os.environ.get(MEMORY_DIRECTORY)
    os.environ[MEMORY_DIRECTORY] = directory
    faults._engines = itertools.count()
    try:
        yield
    finally:
        del os.environ[MEMORY_DIRECTORY]
        if before is not None:
            os.environ[MEMORY_DIRECTORY] = before


def copying(stage: int, dtype: str = "fp32", every: int = 2, **more: Any) -> dict[str, Any]:
    return config(stage, dtype, checkpoint={"memory_copies": {"every": every}}, **more)


def start(node: str, settings: dict[str, Any], seed: int) -> Run:
    with as_node(node):
        return Run(settings, seed=seed)


@pytest.mark.parametrize(
    ("world", "nodes", "stage", "dtype", "optimizer"),
    [
        (2, 1, 1, "bf16", "SGD"),
        (4, 2, 3, "bf16", "AdamW"),
        thorough(4, 2, 0, "fp32", "AdamW"),
        thorough(4, 2, 2, "fp16", "AdamW"),
        thorough(4, 2, 3, "fp32", "Muon"),
    ],
)
@on_ranks("world")
def test_a_state_from_memory_goes_on_with_the_same_bits(
    world: int, nodes: int, stage: int, dtype: str, optimizer: str, tmp_path: Path
) -> None:
    """Each node is lost in turn if there are two: its parts have been sent to the other, and are sent back."""
    root = str(tmp_path)
    folder = f"{root}/node{rank() * nodes // world}"
    settings = copying(stage, dtype, every=5, optimizer=optimizer)
    first = start(folder, settings, seed=1)
    assert first.engine.resume(f"{root}/runs") is None
    losses = [first.step() for _ in range(5)]
    assert first.engine.last_memory_copy.steps == 5 and first.engine.last_memory_copy.seconds > 0
    expected = first.fingerprint()
    losses += [first.step() for _ in range(3)]
    later = first.fingerprint()
    for lost in range(nodes):  # the second one before the next copy is made
        if nodes > 1:
            first_rank(shutil.rmtree, f"{root}/node{lost}")
        second = start(folder, settings, seed=9 + lost)
        assert second.engine.resume(f"{root}/runs") == {}
        assert second.engine.resumed.source == "memory" and second.engine.global_steps == 5
        assert differences(expected, second.fingerprint()) == [] != differences(expected, later)
    assert [second.step() for _ in range(3)] == losses[5:]
    assert differences(later, second.fingerprint()) == []


def in_generations(node: str) -> dict[str, list[str]]:
    folder = Path(node) / "engine0"
    return {
        path.name.split("-")[0]: sorted(entry.name for entry in path.iterdir())
        for path in folder.iterdir()
        if path.name.startswith("step")
    }


def the_only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@on_ranks(4)
def test_two_generations_at_most_and_damage_is_found(tmp_path: Path) -> None:
    nodes = [f"{tmp_path}/node{number}" for number in range(2)]
    node, runs = nodes[rank() // 2], f"{tmp_path}/runs"
    run = start(node, copying(2, every=1), seed=1)
    assert run.engine.resume(runs) is None
    assert run.engine._faults.copies.nodes == [[0, 1], [2, 3]] and run.engine._faults.copies.replicas == 1
    states, held, original = {}, [], module.write_tensors

    def counting(path: str, tensors: Any, **options: Any) -> Any:
        facts = original(path, tensors, **options)
        held.append(len(os.listdir(f"{node}/engine0")) - 1)  # and a marker
        return facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_tensors", counting)
        for step in range(1, 4):
            run.step()
            states[step] = run.fingerprint()
    # Two generations, one of which was being written; every node has the parts of all four ranks.
    assert max(held) == 2
    files = [f"rank{r:05d}of00004-copy.{kind}" for r in range(4) for kind in ("json", "safetensors")]
    assert in_generations(node) == {"step2": files, "step3": files}
    copy = run.engine.last_memory_copy
    assert copy.own_bytes < copy.held_bytes < 3 * copy.own_bytes
    note = next(note for note in run.engine.memory_report().notes if note.startswith("Copies in memory"))
    assert re.search(rf"{node}/engine0: 2 x [\d.]+ KiB planned, 2 x [\d.]+ KiB measured", note), note
    with TensorFile(str(next(Path(node).glob(f"engine0/step3-*/{files[2 * rank() + 1]}")))) as file:
        state = sum(spec.nbytes for key, spec in file.specs.items() if key.startswith(("parameter/", "optimizer/")))
    planned = saved_bytes(run.engine.sharded, run.engine.memory_report().row(Category.OPTIMIZER).planned)
    assert state <= planned <= 1.1 * state + 2000  # padding, which is much of so small a model
    barrier()

    def resumed(steps: int | None, seed: int) -> None:
        other = start(node, copying(2, every=1), seed=seed)
        state = other.engine.resume(runs)
        assert (None if state is None else other.engine.global_steps) == steps
        assert steps is None or differences(states[steps], other.fingerprint()) == []
        barrier()
        assert in_generations(node) == {"step2": files, "step3": files}
        other.engine.destroy()
        barrier()

    def damage(*paths: Path) -> None:
        for path in paths:
            first_rank(change_a_byte, path)

    newest, before = ([the_only(Path(n) / "engine0", f"step{step}-*") for n in nodes] for step in (3, 2))
    # One of two copies is damaged: the other node's is used, and replaces it.
    whole = (newest[0] / files[1]).read_bytes()
    barrier()
    damage(newest[0] / files[1])
    resumed(3, seed=2)
    assert (newest[0] / files[1]).read_bytes() == whole
    barrier()
    # Both are: the generation before.
    damage(newest[0] / files[1], newest[1] / files[1])
    resumed(2, seed=3)
    # A description that is damaged on both: nothing left at all.
    damage(*(path / files[4] for path in before))
    resumed(None, seed=5)


def without_accumulation(stage: int) -> dict[str, Any]:
    """A global batch that is kept whatever the number of ranks: accumulation makes up for it."""
    return copying(stage, train_batch_size=36, gradient_accumulation_steps=None)


def plain(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.fingerprint().items() if name.startswith("plain")}


def copy_without_accumulation(root: str, runs: str) -> list[Any]:
    run = start(f"{root}/node{rank()}", without_accumulation(3), seed=1)
    assert run.engine.resume(runs) is None
    run.step()
    run.step()
    return [plain(run), run.engine.get_lr()]


def resume_without_accumulation(root: str, runs: str, stage: int) -> list[Any]:
    run = start(f"{root}/node{rank()}", without_accumulation(stage), seed=7)
    assert run.engine.resume(runs) == {}
    assert (run.engine.global_steps, run.engine.train_batch_size()) == (2, 36)
    return [plain(run), run.engine.get_lr()]


@pytest.mark.parametrize("stages", [(1,), thorough((1, 3))], ids=str)
def test_another_number_of_ranks_goes_on_from_memory(stages: tuple[int, ...], tmp_path: Path) -> None:
    """Three nodes of one rank copy, one is lost, two go on, at other stages too."""
    runs = str(tmp_path / "runs")
    before = run_ranks(copy_without_accumulation, 3, str(tmp_path), runs)
    shutil.rmtree(tmp_path / "node2")
    for stage in stages:
        root = tmp_path / f"stage{stage}"
        for node in ("node0", "node1"):
            shutil.copytree(tmp_path / node, root / node)
        for values, lr in run_ranks(resume_without_accumulation, 2, str(root), runs, stage):
            assert differences(before[0][0], values) == []
            assert lr == before[0][1]


@on_ranks(2)
def test_the_newest_complete_state_is_taken(tmp_path: Path) -> None:
    runs, node = f"{tmp_path}/runs", f"{tmp_path}/node"
    run = start(node, copying(1, every=2), seed=1)
    run.engine.provide_client_state(lambda: {"at": run.engine.global_steps})
    assert run.engine.resume(runs) is None and run.engine.resumed is None

    def resumed(seed: int) -> tuple[str, int, Any]:
        other = start(node, copying(1, every=2), seed=seed)
        state = other.engine.resume(runs)
        found = other.engine.resumed
        assert found.steps == other.engine.global_steps and found.seconds > 0
        other.engine.destroy()
        barrier()
        return found.source, found.steps, state

    run.step()
    run.engine.save_checkpoint(runs, tag="first", client_state={"on": "disk"})
    assert resumed(2) == ("disk", 1, {"on": "disk"})
    run.step()
    assert resumed(3) == ("memory", 2, {"at": 2})
    run.engine.save_checkpoint(runs, tag="second")
    assert resumed(4) == ("memory", 2, {"at": 2})  # of equal ones that in memory
    run.step()
    run.engine.save_checkpoint(runs, tag="aside", save_latest=False)
    assert resumed(5) == ("memory", 2, {"at": 2})  # what was not to become `latest` is not gone on from
    run.engine.save_checkpoint(runs, tag="third", client_state={"on": "disk"})
    assert resumed(6) == ("disk", 3, {"on": "disk"})
    first_rank(change_a_byte, next(Path(runs, "third").glob("rank00001*")))
    run.step()
    shutil.rmtree(f"{node}/engine0", ignore_errors=True)
    barrier()
    assert resumed(7) == ("disk", 3, {})  # what `latest` names is damaged: the newest other one


def test_files_of_a_tied_parameter_are_found_under_its_other_names() -> None:
    def stored(kind: str, *names: str) -> StoredTensor:
        return StoredTensor(names[0], kind, (4,), "float32", (Slice(kind, names[0], 0, 4),), names[1:])

    tensor = SimpleNamespace(name="head", aliases=(), global_shape=(4,))
    model: Any = SimpleNamespace(registry=[tensor], comm=SimpleNamespace(rank=0, world=1), place={})
    model.value_runs, model.box_of = lambda: {0: [(0, 4, None)]}, lambda tensor: None
    tensors = [stored("parameter", "embedding", "head"), stored("optimizer/exp_avg", "embedding")]
    joined = Manifest("a", 0.0, {}, {}, {}, {}, [*tensors, stored("optimizer/exp_avg_sq", "other")])
    assert needed_files(model, joined) == {"parameter", "optimizer/exp_avg"}


@on_ranks(2)
def test_weights_that_were_loaded_after_a_copy_are_not_those_in_memory(tmp_path: Path) -> None:
    runs, node = f"{tmp_path}/runs", f"{tmp_path}/node"
    run = start(node, copying(1, every=1), seed=1)
    assert run.engine.resume(runs) is None
    run.step()
    values = {name: torch.zeros_like(value) for name, value in run.engine.module_state_dict().items()}
    run.engine.load_module_state_dict(values)
    run.engine.save_checkpoint(runs)
    other = start(node, copying(1, every=1), seed=2)
    other.engine.resume(runs)
    assert other.engine.resumed.source == "disk"
    assert not any(value.any() for value in other.engine.module_state_dict().values())


@on_ranks(2)
def test_a_copy_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    original = module.write_tensors

    def full(path: str, tensors: Any, **options: Any) -> Any:
        if rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return original(path, tensors, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_tensors", full)
        run = start(f"{tmp_path}/a", copying(2, every=1), seed=1)
        # It has never worked, so something is wrong with the machine or the configuration.
        with pytest.raises(CheckpointError, match=r"No space left.*--shm-size|failed on rank 1"):
            run.step()
        assert run.engine.global_steps == 1
    run = start(f"{tmp_path}/b", copying(2, every=1), seed=1)
    run.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_tensors", full)
        run.step()  # goes on
        assert run.engine.last_memory_copy.steps == 1
        with pytest.raises(CheckpointError, match="No space left"):
            run.engine.copy_to_memory()
        barrier()
    assert [name[:5] for name in in_generations(f"{tmp_path}/b")] == ["step1"]
    assert not [name for name in os.listdir(f"{tmp_path}/b/engine0") if name.startswith(".")]
    run.step()
    assert run.engine.last_memory_copy.steps == 3


@on_ranks(2)
def test_a_rank_without_memory_for_buffers_ends_the_exchange(tmp_path: Path) -> None:
    run = Run(config(1))

    def hold(_: torch.Tensor) -> None:
        if rank() == 1:
            raise MemoryError("no memory")

    (tmp_path / "a").write_bytes(bytes(9))
    with pytest.raises(CheckpointError, match="no memory"):
        exchange_files(run.engine.job, run.engine.device, [FileTransfer("a", 9, 0, 1)], f"{tmp_path}", hold)


@on_ranks(2)
def test_mistakes_are_named(tmp_path: Path) -> None:
    run = Run(config(1))
    with pytest.raises(UsageError, match="memory_copies"):
        run.engine.copy_to_memory()
    assert run.engine.last_memory_copy is None
    with pytest.raises(CheckpointPathError, match="ranks name different directories"):
        run.engine.resume(f"{tmp_path}/{rank()}")
    with pytest.raises(CheckpointPathError, match="save_dir"):
        run.engine.resume("")
    with pytest.raises(UsageError, match="without arguments"):
        run.engine.provide_client_state({"epoch": 1})
    with pytest.raises(UsageError, match=r"shardwise run.*checkpoint.memory_copies.directory"):
        Run(copying(1))
    Path(f"{tmp_path}/file").touch()
    with pytest.raises(CheckpointError, match="memory_copies"):
        Run(config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{tmp_path}/file"}}))
    # A directory that the script has named is removed by whoever has made it.
    own = Run(config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{tmp_path}/own"}}))
    own.micro_batch()
    with pytest.raises(UsageError, match="unfinished accumulation window"):
        own.engine.copy_to_memory()
    own.micro_batch()
    assert os.listdir(f"{tmp_path}/own")
    barrier()
    own.engine.destroy()
    barrier()
    assert os.listdir(f"{tmp_path}/own") == []
