"""Bytes that cross the network: those of the ledger, by machine; and sockets of a job, which listen on its network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.machines.conftest import Run, Start
from tests.machines.lab import Lab
from tests.machines.test_ssh import running

pytestmark = pytest.mark.limit(250)

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
CODES = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"stage": 1},
    "ZeRO 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "HSDP": {"stage": 3, "stage3_param_persistence_threshold": 0, "mics_shard_size": 2},
    "ZeRO++": {"stage": 3, "stage3_param_persistence_threshold": 0, **CODES},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_interface_sends_the_bytes_of_the_ledger(lab: Lab, run: Run, name: str) -> None:
    config = json.dumps({"optimizer": ADAM, "zero_optimization": SETTINGS[name]})
    script = str(Path(__file__).parent / "traffic.py")
    done = run(["-H", str(lab.hostfile(2, [1, 2]))], config, script=script)
    found = re.search(r"traffic (\{.*\})", done.stdout)
    assert found is not None, done.stderr
    traffic = json.loads(found[1])
    assert traffic["sent"] == pytest.approx(traffic["ledger"], rel=0.05)


def test_all_sockets_listen_on_the_network_of_the_job(lab: Lab, start: Start) -> None:
    process = start(["-H", str(lab.hostfile(2, [1, 2]))], "sleep", "0")
    running(process, 4)
    for number in range(3):
        lines = lab.run(number, ["ss", "-ltnpH"]).stdout.splitlines()
        lines = [line for line in lines if "slurm" not in line]  # daemons of other tests
        addresses = {line.split()[3].rpartition(":")[0] for line in lines if not line.split()[3].endswith(":22")}
        assert addresses and addresses <= {lab.address(number), "127.0.0.1"}
