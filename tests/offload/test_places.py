"""What every place has to do (`shardwise.memory.places.StateHome`); a new one is added to `PLACES` here."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.compat import can_hand_memory_on
from shardwise.errors import OffloadError
from shardwise.memory import Accountant, Category, Tier, places
from shardwise.memory.places import StateHome, TieredTensors, acquiring, in_turn, tier_in_use
from shardwise.offload import Disks, HostPlace, disk
from tests.offload.settings import played_device
from tests.zero.elsewhere import Elsewhere

CPU = torch.device("cpu")


@contextlib.contextmanager
def on_disk(directory: Path, used_on: torch.device | None, far: bool) -> Iterator[StateHome]:
    with played_device() if far else contextlib.nullcontext():
        place = Disks(parameters=directory).place(directory, CPU, used_on)
        yield place
        place.close()


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[StateHome]]] = {
    "host": lambda path: contextlib.nullcontext(HostPlace(CPU)),
    "pageable host": lambda path: contextlib.nullcontext(HostPlace(CPU, pinned=False)),
    "disk": lambda path: on_disk(path, None, far=False),
    "disk, used on the host": lambda path: on_disk(path, CPU, far=False),
    "disk of a device": lambda path: on_disk(path, None, far=True),
    "elsewhere": lambda path: contextlib.nullcontext(Elsewhere(frees=True).on(CPU)),
}


@pytest.fixture(params=PLACES)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateHome]:
    with PLACES[request.param](tmp_path) as place:
        yield place
        gc.collect(1)  # those of the test; a full collection takes a second


def counted(accountant: Accountant, tier: Tier) -> int:
    return sum(accountant.live_in(tier).values())


def test_a_tensor_keeps_its_values_and_its_views_and_has_memory_only_while_it_is_lent(home: StateHome) -> None:
    accountant, used = Accountant(), tier_in_use(home)
    tensor = torch.arange(1000, dtype=torch.float32)
    view, expected = tensor[10:20].view(2, 5), tensor.clone()
    tiered = TieredTensors(home, accountant)
    tiered.keep(Category.MASTER, tensor)
    assert tensor.untyped_storage().nbytes() == 0
    assert counted(accountant, home.tier) == 4000 and counted(accountant, used) == (4000 if used is home.tier else 0)
    for _ in range(2):
        with tiered.use(written=True):
            assert torch.equal(tensor, expected) and torch.equal(view, expected[10:20].view(2, 5))
            assert counted(accountant, used) >= 4000
            view.add_(1)
            expected[10:20] += 1
        assert tensor.untyped_storage().nbytes() == 0
    with tiered.use(written=False):
        tensor.zero_()  # not stored
    assert torch.equal(tiered.read(tensor), expected)
    tiered.start()
    tiered.finish()
    tiered.forget(tensor)
    assert torch.equal(tensor, expected) and counted(accountant, Tier.DISK) == counted(accountant, Tier.HOST) == 0


def test_what_is_not_read_is_not_brought_and_what_is_written_then_is_stored(home: StateHome) -> None:
    tiered, tensor = TieredTensors(home, Accountant()), torch.ones(5000)
    tiered.keep(Category.GRADIENTS, tensor)
    with tiered.use(read=False, written=True):
        tensor.fill_(3)
    assert torch.equal(tiered.read(tensor), torch.full((5000,), 3.0))


def test_a_loan_inside_of_another_brings_nothing_and_writing_counts_at_the_end(home: StateHome) -> None:
    accountant = Accountant()
    tiered, tensor = TieredTensors(home, accountant), torch.zeros(64)
    tiered.keep(Category.MASTER, tensor)
    with tiered.use(written=False):
        with tiered.use(written=True):
            tensor += 1
        assert torch.equal(tiered.read(tensor), torch.ones(64)) and tiered.acquired == 1
    assert torch.equal(tiered.read(tensor), torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 4097])
def test_dtypes_and_sizes(home: StateHome, dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).to(dtype)
    expected = tensor.clone()
    tiered = TieredTensors(home, Accountant())
    tiered.keep(Category.OPTIMIZER, tensor)
    with tiered.use(written=True):
        assert torch.equal(tensor, expected)
    into = torch.empty_like(expected)
    assert tiered.read(tensor, into) is into and torch.equal(into, expected)


def test_what_has_no_memory_of_its_own_stays_where_it_is(home: StateHome) -> None:
    whole = torch.arange(12.0)
    accountant = Accountant()
    tiered = TieredTensors(home, accountant)
    for part in (whole[3:5], whole.view(3, 4).t()):
        tiered.keep(Category.MASTER, part)
    assert torch.equal(whole, torch.arange(12.0)) and counted(accountant, home.tier) in (0, 48)


def test_what_is_never_given_back_ends_in_silence(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from shardwise.memory import Accountant, Category\n"
        "from shardwise.memory.places import TieredTensors\n"
        "from shardwise.offload import Disks\n"
        "cpu = torch.device('cpu')\n"
        "tiered = TieredTensors(Disks().place(Path(sys.argv[1]), cpu, cpu), Accountant())\n"
        "tiered.keep(Category.MASTER, torch.ones(5000))\n"
        "tiered.start()\ntiered.give_back(written=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_looking_ahead_changes_nothing_but_where_bytes_are(home: StateHome) -> None:
    accountant = Accountant()
    tiered, tensor = TieredTensors(home, accountant), torch.arange(3000.0)
    expected, most = tensor.clone(), tensor.nbytes
    tiered.keep(Category.PARAMETERS, tensor)
    before = counted(accountant, Tier.HOST)
    for use in ("read", "lend", "write", "forget"):
        tiered.look_ahead(tensor)
        assert counted(accountant, Tier.HOST) - before == (most if home.lags else 0)
        if use == "read":
            assert torch.equal(tiered.read(tensor), expected)
        elif use == "forget":
            tiered.start(read=False)
            tiered.forget(tensor)
            continue
        else:
            with tiered.use(read=use == "lend", written=True):
                assert use == "write" or torch.equal(tensor, expected)
                tensor.copy_(expected.neg_())
        assert counted(accountant, Tier.HOST) == before
    assert counted(accountant, Tier.HOST) == 0


def test_what_the_host_can_work_on_is_worked_on_there(home: StateHome) -> None:
    tiered, tensor = TieredTensors(home, Accountant()), torch.arange(6.0).view(2, 3)
    tiered.keep(Category.GRADIENTS, tensor)
    if not home.at_hand:
        return
    there = tiered.in_place(tensor)
    assert there.shape == tensor.shape and there.dtype == tensor.dtype and tiered.in_place(tensor) is there
    there *= 2
    assert torch.equal(tiered.read(tensor), torch.arange(6.0).view(2, 3) * 2)


def test_units_in_turn_have_memory_for_three(home: StateHome) -> None:
    accountant, used = Accountant(), tier_in_use(home)
    parts = [(TieredTensors(home, accountant), torch.full((2500,), float(number))) for number in range(8)]
    for tiered, tensor in parts:
        tiered.keep(Category.OPTIMIZER, tensor)
    resting = counted(accountant, used)
    accountant.reset_peak()
    seen: list[float] = []

    def use(part: tuple[TieredTensors, torch.Tensor]) -> None:
        seen.append(part[1][0].item())
        part[1].add_(100)

    for _ in range(2):
        in_turn([(part, [(part[0], True)]) for part in parts], use)
    assert seen == [*map(float, range(8)), *(100.0 + number for number in range(8))]
    assert counted(accountant, used) == resting
    assert accountant.peak_total_in(used) - resting <= (3 if home.lags else 2) * 10_000
    for number, (tiered, tensor) in enumerate(parts):
        assert torch.equal(tiered.read(tensor), torch.full((2500,), 200.0 + number))


@contextlib.contextmanager
def new_memory() -> Iterator[list[int]]:
    """Give the sizes of the memory that tiered tensors of a disk take from the system."""
    sizes: list[int] = []
    start = disk._Kept.start

    def started(kept: disk._Kept, *, read: bool) -> None:
        if not kept._storage.nbytes():
            sizes.append(kept._size)
        start(kept, read=read)

    with mock.patch.object(disk._Kept, "start", started):
        yield sizes


@pytest.mark.skipif(not can_hand_memory_on, reason="storages cannot leave their memory to others")
def test_the_first_three_units_leave_their_memory_to_the_others(tmp_path: Path) -> None:
    with on_disk(tmp_path, CPU, far=False) as home:
        accountant = Accountant()
        parts = [
            (TieredTensors(home, accountant), [torch.full((900,), float(n)), torch.full((500,), -float(n))])
            for n in range(9)
        ]
        views = [tensors[0].view(30, 30)[5] for _, tensors in parts]
        for tiered, tensors in parts:
            for tensor in tensors:
                tiered.keep(Category.OPTIMIZER, tensor)
        resting = counted(accountant, Tier.HOST)

        def use(part: tuple[TieredTensors, list[torch.Tensor]]) -> None:
            number = parts.index(part)
            assert views[number].tolist() == [number] * 30 and part[1][1][-1] == -number
            for tensor in part[1]:
                tensor.mul_(2)

        with new_memory() as sizes:
            in_turn([(part, [(part[0], True)]) for part in parts], use)
        assert sorted(sizes) == [2000] * 3 + [3600] * 3
        assert counted(accountant, Tier.HOST) == resting and parts[0][0].spare is None
        for number, (tiered, tensors) in enumerate(parts):
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
            assert tiered.read(tensors[0]).tolist() == [2 * number] * 900


@pytest.mark.parametrize("hands_on", [True, False])
def test_units_of_other_sizes_have_no_more_memory_than_has_been_lent_at_once(tmp_path: Path, hands_on: bool) -> None:
    sizes = [5000, 20, 300, 300, 5000, 40, 40, 40, 40, 6000, 20, 300, 300]
    three = max(sum(sizes[n : n + 3]) for n in range(len(sizes)))
    with on_disk(tmp_path, CPU, far=False) as home, mock.patch.object(places, "can_hand_memory_on", hands_on):
        accountant = Accountant()
        parts = [(TieredTensors(home, accountant), torch.rand(size)) for size in sizes]
        expected = [tensor + 1 for _, tensor in parts]
        for tiered, tensor in parts:
            tiered.keep(Category.OPTIMIZER, tensor)
        accountant.reset_peak()
        in_turn([(part, [(part[0], True)]) for part in parts], lambda part: part[1].add_(1))
        assert 4 * max(sizes) < accountant.peak_total_in(Tier.HOST) <= 4 * three
        assert counted(accountant, Tier.HOST) == 0
        assert all(torch.equal(tiered.read(t), e) for (tiered, t), e in zip(parts, expected, strict=True))


def test_memory_with_which_something_comes_is_not_kept(tmp_path: Path) -> None:
    with on_disk(tmp_path, CPU, far=False) as home:
        accountant = Accountant()
        parts = [(TieredTensors(home, accountant), torch.ones(500)) for _ in range(9)]
        for tiered, tensor in parts:
            tiered.keep(Category.MASTER, tensor)
        made = []

        def use(part: tuple[TieredTensors, torch.Tensor]) -> None:
            made.append(part[1] + 1)  # as an optimizer makes its state
            part[0].keep(Category.OPTIMIZER, made[-1])

        for most in (6, 6):  # one of a unit that comes and one of another, with three in all
            accountant.reset_peak()
            in_turn([(part, [(part[0], True)]) for part in parts], use if not made else lambda part: None)
            assert accountant.peak_total_in(Tier.HOST) <= most * 2000
        assert all(part[0].read(tensor)[0] == 2 for part, tensor in zip(parts, made, strict=True))


def test_an_exception_in_between_leaves_everything_stored(home: StateHome) -> None:
    parts = [(TieredTensors(home, Accountant()), torch.zeros(500)) for _ in range(4)]
    for tiered, tensor in parts:
        tiered.keep(Category.OPTIMIZER, tensor)

    def use(part: tuple[TieredTensors, torch.Tensor]) -> None:
        part[1].add_(1)
        if part is parts[2]:
            raise KeyError

    with pytest.raises(KeyError):
        in_turn([(part, [(part[0], True)]) for part in parts], use)
    assert [tiered.acquired for tiered, _ in parts] == [0] * 4
    assert [tiered.read(tensor)[0].item() for tiered, tensor in parts] == [1, 1, 1, 0]
    with pytest.raises(KeyError), acquiring([(tiered, True) for tiered, _ in parts]):
        raise KeyError
    assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in parts)


@pytest.mark.parametrize("name", PLACES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    uses=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["write", "look", "read", "renew", "again"])), max_size=12
    ),
)
def test_any_order_of_uses(name: str, tmp_path: Path, sizes: list[int], uses: list[tuple[int, str]]) -> None:
    with PLACES[name](tmp_path) as home:
        accountant = Accountant()
        tiered = [TieredTensors(home, accountant) for _ in sizes]
        tensors = [torch.rand(size) for size in sizes]
        expected = [tensor.clone() for tensor in tensors]
        for one, tensor in zip(tiered, tensors, strict=True):
            one.keep(Category.MASTER, tensor)
        for place, use in uses:
            number = place % len(sizes)
            if use == "look":
                tiered[number].look_ahead(tensors[number])
            elif use == "again":
                tensors[number] = expected[number].clone()
                tiered[number].keep_only(Category.MASTER, [tensors[number]])
            elif use == "read":
                assert torch.equal(tiered[number].read(tensors[number]), expected[number])
            else:
                with tiered[number].use(read=use == "write", written=True):
                    expected[number] = expected[number] + 1 if use == "write" else torch.rand(sizes[number])
                    tensors[number].copy_(expected[number])
        for one, tensor, right in zip(tiered, tensors, expected, strict=True):
            assert torch.equal(one.read(tensor), right)
            one.clear()
        assert counted(accountant, Tier.DISK) == counted(accountant, Tier.HOST) == 0


@pytest.mark.parametrize(("method", "read", "failing"), [("start", True, 1), ("start", False, 0), ("finish", True, 2)])
def test_what_memory_runs_out_for_is_not_acquired(home: StateHome, method: str, read: bool, failing: int) -> None:
    accountant = Accountant()
    tiered, tensors = TieredTensors(home, accountant), [torch.full((500,), float(number)) for number in range(3)]
    for tensor in tensors:
        tiered.keep(Category.OPTIMIZER, tensor)
    resting = [accountant.live_in(tier) for tier in Tier]
    stored = [entry.stored for entry in tiered._kept.values()][failing]
    real = getattr(stored, method)

    def fails(**keys: Any) -> None:
        real(**keys)
        raise MemoryError

    with mock.patch.object(stored, method, fails), pytest.raises(MemoryError):
        tiered.acquire(read=read)
    with mock.patch.object(stored, method, side_effect=MemoryError), pytest.raises(MemoryError):
        tiered.acquire(read=read)
    tiered.settle()
    assert tiered.acquired == 0 and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert [accountant.live_in(tier) for tier in Tier] == resting
    with tiered.use(written=False):
        assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0], [2.0]]


def test_values_of_real_size(home: StateHome) -> None:
    tensor = torch.randint(256, (33 << 20,), dtype=torch.uint8)
    expected = tensor.clone()
    tiered = TieredTensors(home, Accountant())
    tiered.keep(Category.OPTIMIZER, tensor)
    tiered.look_ahead(tensor)
    with tiered.use(written=True):
        assert torch.equal(tensor, expected)
        tensor[-1] ^= 255
        expected[-1] ^= 255
    assert torch.equal(tiered.read(tensor), expected)


def test_what_cannot_be_stored_is_an_error_and_keeps_no_memory(tmp_path: Path) -> None:
    with on_disk(tmp_path, CPU, far=False) as home:
        accountant = Accountant()
        parts = [(TieredTensors(home, accountant), torch.zeros(500)) for _ in range(4)]
        for tiered, tensor in parts:
            tiered.keep(Category.OPTIMIZER, tensor)
        resting = counted(accountant, Tier.HOST)
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        told = pytest.raises(OffloadError, match=r"Input/output error\. Check the disk")
        with mock.patch("os.pwritev", side_effect=error), told:
            in_turn([(part, [(part[0], True)]) for part in parts], lambda part: part[1].add_(1))
        assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in parts)
        assert [tiered.acquired for tiered, _ in parts] == [0] * 4
        assert counted(accountant, Tier.HOST) == resting
        assert [tiered.read(tensor)[0].item() for tiered, tensor in parts[2:]] == [0, 0]


def test_what_cannot_be_read_is_not_stored_over_what_is_there(tmp_path: Path) -> None:
    with on_disk(tmp_path, CPU, far=False) as home:
        parts = [(TieredTensors(home, Accountant()), torch.full((500,), float(number))) for number in range(4)]
        for tiered, tensor in parts:
            tiered.keep(Category.OPTIMIZER, tensor)
        wanted = [(part, [(part[0], True)]) for part in parts]
        read, count = os.preadv, 0

        def reading(*args: object) -> int:
            nonlocal count
            count += 1
            if count == 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(*args)  # type: ignore[arg-type]

        with mock.patch("os.preadv", reading), pytest.raises(OffloadError, match="reading 2000 bytes"):
            in_turn(wanted, lambda part: part[1].add_(10))
        failing = mock.patch("os.preadv", side_effect=OSError(errno.EIO, ""))
        with failing, pytest.raises(OffloadError), parts[3][0].use(written=True):
            raise AssertionError("it has not come")
        assert [tiered.read(tensor)[0].item() for tiered, tensor in parts] == [10, 11, 2, 3]
        assert all(tensor.untyped_storage().nbytes() == 0 and not tiered.acquired for tiered, tensor in parts)
