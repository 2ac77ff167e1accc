"""A tutorial's way from three new machines to a job of the command `deepspeed` on them, command by command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.lab import Lab

ROOT = Path(__file__).parents[2]
SSH = "/root/.ssh"
pytestmark = pytest.mark.limit(300)

pytest.importorskip("transformers")

# On a machine that is none of the workers. `$MASTER_ADDR` is empty where the last command expands it, on the worker:
# tutorials have it so, in single quotes.
COMMANDS = """
set -e
mkdir -p ~/.ssh && mount -t tmpfs -o mode=700 tmpfs ~/.ssh
for number in 1 2 3; do
cat >> ~/.ssh/config << EOF
Host worker-$number
  HostName {net}.$((number + 1))
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  User root
EOF
done

mkdir -p multi-node-training-keys
ssh-keygen -q -t rsa -N "" -f ./multi-node-training-keys/id_rsa
for worker in worker-1 worker-2 worker-3; do
scp -q ./multi-node-training-keys/id_rsa.pub $worker:/root/.ssh/id_rsa.pub
scp -q ./multi-node-training-keys/id_rsa $worker:/root/.ssh/id_rsa
ssh $worker 'cat /root/.ssh/id_rsa.pub >> /root/.ssh/authorized_keys'
done

worker_ip_1=$(ssh -G worker-1 | awk '$1 == "hostname" {{ print $2 }}')
worker_ip_2=$(ssh -G worker-2 | awk '$1 == "hostname" {{ print $2 }}')
worker_ip_3=$(ssh -G worker-3 | awk '$1 == "hostname" {{ print $2 }}')
for worker in worker-1 worker-2 worker-3; do
ssh $worker 'cat > /root/.ssh/config' << EOF
Host worker-1
    HostName $worker_ip_1
    StrictHostKeyChecking no

Host worker-2
    HostName $worker_ip_2
    StrictHostKeyChecking no

Host worker-3
    HostName $worker_ip_3
    StrictHostKeyChecking no
EOF
done

printf 'worker-1 slots=1\\nworker-2 slots=1\\nworker-3 slots=1\\n' > hostfile
scp -q hostfile worker-1:{folder}/tutorial/hostfile
MASTER_ADDR=$(ssh -G worker-1 | awk '$1 == "hostname" {{ print $2 }}')
ssh worker-1 'cd {folder}/tutorial && PATH="{folder}/bin:$PATH" deepspeed --master_addr=$MASTER_ADDR \
--hostfile=./hostfile zero_dp_training.py --stage=2 --rows=24 --length=32'
"""
LAUNCHER = """#!/bin/sh
export PYTHONPATH={root}/dropin:{root}/dropin/src:{root}/src HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec {python} -m deepspeed.launcher.runner "$@"
"""


def losses(text: str) -> list[str]:
    return re.findall(r"Loss: ([\d.]+)", text)


@pytest.fixture
def keys(lab: Lab) -> Iterator[None]:
    """Give each machine a directory of its own for keys, at the place where users have it."""
    made = not os.path.exists(SSH)
    os.makedirs(SSH, mode=0o700, exist_ok=True)
    for number in range(1, lab.count + 1):
        own = lab.folder / f"home-{number}" / ".ssh"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        lab.mount(number, own, SSH)
    yield
    for number in range(1, lab.count + 1):
        lab.unmount(number, SSH)
    if made:
        os.rmdir(SSH)


@pytest.mark.usefixtures("keys")
def test_a_tutorials_commands_train_on_three_machines(lab: Lab, tmp_path: Path) -> None:
    (lab.folder / "bin").mkdir()
    (lab.folder / "tutorial").mkdir()
    (lab.folder / "tutorial" / "zero_dp_training.py").write_text((ROOT / "examples/zero_dp_training.py").read_text())
    launcher = lab.folder / "bin" / "deepspeed"
    launcher.write_text(LAUNCHER.format(root=ROOT, python=sys.executable))
    launcher.chmod(0o755)
    commands = COMMANDS.format(folder=lab.folder, net=lab.address(0).rpartition(".")[0])
    process = lab.start(0, ["unshare", "-m", "bash", "-c", commands], cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out[-2000:] + err[-3000:]
    assert sorted(re.findall(r"Device \d - ZeRO Stage: \d", out)) == ["Device 0 - ZeRO Stage: 2"] * 3
    one = subprocess.run(
        [launcher, "--num_gpus=3", "zero_dp_training.py", "--stage=2", "--rows=24", "--length=32"],
        cwd=lab.folder / "tutorial",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert one.returncode == 0, one.stderr[-3000:]
    # The script prints the losses of each machine's first rank.
    assert len(losses(out)) == 3 * len(losses(one.stdout)) > 3
    assert set(losses(one.stdout)) <= set(losses(out))
