"""What every place has to do (`shardwise.memory.places.StateHome`); a new one is added to `PLACES` here."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import OffloadError
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import StateHome, TieredTensors, acquiring, in_turn, tier_in_use
from shardwise.offload import Disks, HostPlace
from tests.offload.settings import played_device

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


def test_a_loan_inside_of_another_brings_nothing_and_writing_counts_at_the_end(home: StateHome) -> None:
    accountant = Accountant()
    tiered, tensor = TieredTensors(home, accountant), torch.zeros(64)
    tiered.keep(Category.MASTER, tensor)
    with tiered.use(written=False):
        with tiered.use(written=True):
            tensor += 1
        assert torch.equal(tiered.read(tensor), torch.ones(64)) and tiered.acquired == 1
    assert torch.equal(tiered.read(tensor), torch.ones(64))


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4097), (torch.int64, 0), (torch.bool, 1)])
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
