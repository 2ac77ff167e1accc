"""A process's place, read from the variables of every launcher."""

from __future__ import annotations

import pytest

from shardwise.comm.environment import RankPlace, discover
from shardwise.errors import LaunchError
from tests.harness.tables import tables

TABLES = tables(__file__)

TORCHRUN, OMPI, SLURM = (TABLES[name] for name in ("torchrun", "ompi", "slurm"))


def test_torchrun() -> None:
    place = discover(TORCHRUN)
    assert place == RankPlace(3, 8, 1, 2, "node0", 29501, "the environment")
    assert not place.single_machine
    assert "torchrun" in discover({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}).source


def test_open_mpi_mvapich_and_pmi() -> None:
    assert discover(OMPI) == RankPlace(3, 4, 1, 2, "node0", None, "Open MPI")
    local = {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": ""}
    assert discover(local) == RankPlace(3, 4, 3, 4, "127.0.0.1", None, "Open MPI")
    mvapich = {key.replace("OMPI", "MV2"): value for key, value in OMPI.items()}
    assert discover(mvapich).source == "MVAPICH"
    pmi = {
        "PMI_RANK": "0",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "2",
        "MASTER_PORT": "5",
    }
    assert discover(pmi) == RankPlace(0, 2, 0, 2, "127.0.0.1", 5, "MPI (PMI)")


def test_slurm() -> None:
    assert discover(SLURM) == RankPlace(5, 7, 1, 3, "gpu07", None, "Slurm")
    assert discover({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}).local_world_size == 4
    assert discover({**SLURM, "MASTER_ADDR": "login"}).master_addr == "login"
    # A batch script, before srun, is one process whatever the allocation.
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    assert discover(batch).world_size == 1


def test_torch_variables_win_and_schedulers_can_be_left_out() -> None:
    assert discover({**SLURM, **TORCHRUN}).rank == 3
    assert discover(SLURM, schedulers=False).world_size == 1


def test_no_launcher() -> None:
    assert discover({"PATH": "/bin", "RANK": ""}) == RankPlace(0, 1, 0, 1, "127.0.0.1", 0, "no launcher")
    assert discover({"RANK": "0", "WORLD_SIZE": "1"}).single_machine


def test_local_rank_is_known_where_only_one_machine_is_possible() -> None:
    by_hand = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert discover(by_hand) == RankPlace(2, 4, 2, 4, "localhost", 1, "the environment")
    # Several machines, and nobody tells how many processes each has.
    lightning = {**by_hand, "MASTER_ADDR": "node0", "LOCAL_RANK": "0"}
    assert discover(lightning).local_world_size is None and not discover(lightning).single_machine


def test_local_size_may_be_the_number_of_devices() -> None:
    """Scripts set it to what the machine has, and start fewer processes."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    place = discover({**env, "LOCAL_SIZE": "8"})
    assert place.local_world_size == 2 and place.single_machine


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
def test_what_is_missing_is_named(missing: str) -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(LaunchError, match=missing):
        discover(env)


@pytest.mark.parametrize(("changes", "message"), TABLES["contradictions"])
def test_contradictions_name_the_variables(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        discover({**TORCHRUN, **changes})


@pytest.mark.parametrize(("env", "message"), TABLES["unclear"])
def test_unclear_environments(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        discover(env)
