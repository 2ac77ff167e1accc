"""Test machines: network namespaces with addresses and an ssh server each, joined by a bridge.

Needs root, Linux, iproute2 and OpenSSH's server. Machine 0 is the one to start jobs on; it is in no hostfile.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SSHD = "/usr/sbin/sshd"
_NET = "10.77.0"
_SSHD_CONFIG = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys {folder}/home-{number}/.ssh/authorized_keys
SetEnv HOME={folder}/home-{number}
PidFile {folder}/sshd-{number}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
Subsystem sftp internal-sftp
PermitRootLogin yes
MaxStartups 100
LogLevel ERROR
"""
_SSH_CONFIG = """
Host *
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    LogLevel ERROR
"""
_SLURM_CONFIG = """
ClusterName=lab
SlurmctldHost=m0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdTimeout=15
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why there can be no machines here; empty if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "ssh", SSHD, "ssh-keygen", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program} (apt-get install iproute2 openssh-server)"
    made = subprocess.run(["ip", "netns", "add", "swprobe"], capture_output=True, text=True)
    if made.returncode:
        return f"namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "swprobe"], check=False)
    return ""


class Lab:
    """`count` machines besides machine 0, up in the block. `name(n)` and `address(n)` are those of machine n."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="machines-"))
        self._servers: list[subprocess.Popen[bytes]] = []
        self._movers: dict[int, subprocess.Popen[bytes]] = {}
        self._slurm_runs = False

    def name(self, number: int) -> str:
        """Return the name of a machine."""
        return f"m{number}"

    def space(self, number: int) -> str:
        """Return the name of a machine's namespace."""
        return f"swm{number}"

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"{_NET}.{number + 1}"

    @property
    def ssh(self) -> list[str]:
        """Arguments of ssh with which it finds keys and hosts of the lab."""
        return ["-F", str(self.folder / "ssh_config")]

    def hostfile(self, slots: int, machines: Sequence[int] | None = None) -> Path:
        """Write a hostfile of some machines, by default all but machine 0; return its path."""
        path = self.folder / "hostfile"
        chosen = range(1, self.count + 1) if machines is None else machines
        path.write_text("".join(f"{self.name(number)} slots={slots}\n" for number in chosen))
        return path

    def start(self, number: int, argv: Sequence[str | Path], **options: object) -> subprocess.Popen[str]:
        """Start a command on a machine."""
        # Its name is that of the machine, too.
        script = f'hostname {self.name(number)} && exec "$@"'
        command = [
            "ip",
            "netns",
            "exec",
            self.space(number),
            "unshare",
            "-u",
            "sh",
            "-c",
            script,
            "sh",
            *map(str, argv),
        ]
        made: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        )
        return made

    def train(self, options: Sequence[str], script: str | Path, *args: str) -> subprocess.Popen[str]:
        """Start `shardwise run` on machine 0 with options, a script and its arguments."""
        given = [sys.executable, "-m", "shardwise.launch", "run", "--launcher-args", " ".join(self.ssh), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment.pop("GLOO_SOCKET_IFNAME", None)  # that of the tests on one machine
        environment["HOME"] = str(self.folder)  # without open connections of ssh to the machines of an earlier lab
        return self.start(0, [*given, script, *args], env=environment)

    def run(self, number: int, argv: Sequence[str | Path], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        process = self.start(number, argv)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"not over after {timeout} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def slurm(self) -> dict[str, str]:
        """Start Slurm on all machines, once: its controller on machine 0; return the variables for its commands.

        Needs slurmctld, slurmd and munge; the daemons end with the lab.
        """
        config = self.folder / "slurm.conf"
        variables = {**os.environ, "SLURM_CONF": str(config)}
        if self._slurm_runs:
            return variables
        nodes = range(1, self.count + 1)
        for name in ("state", *(f"spool-{self.name(number)}" for number in nodes)):
            (self.folder / name).mkdir()
        lines = [
            f"NodeName={self.name(n)} NodeAddr={self.address(n)} CPUs={os.cpu_count()} State=UNKNOWN" for n in nodes
        ]
        config.write_text(_SLURM_CONFIG.format(folder=self.folder, address=self.address(0), nodes="\n".join(lines)))
        if subprocess.run(["pgrep", "munged"], capture_output=True).returncode:
            os.makedirs("/run/munge", exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            _do("su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged")
        for number in range(self.count + 1):
            daemon = f"slurmd -D -f {config} -N {self.name(number)}" if number else f"slurmctld -D -f {config}"
            # Not by `ip netns exec`, which hides the control groups that slurmd needs.
            hosts = f"mount --bind /etc/netns/{self.space(number)}/hosts /etc/hosts"
            script = f"hostname {self.name(number)} && {hosts} && exec {daemon}"
            command = ["nsenter", f"--net=/run/netns/{self.space(number)}", "unshare", "-m", "-u", "sh", "-c", script]
            log = (self.folder / f"slurm-{number}.log").open("wb")
            self._servers.append(subprocess.Popen(command, stdout=log, stderr=log))
            log.close()
            time.sleep(0.0 if number else 1.5)
        deadline = time.monotonic() + 30
        while True:
            listed = self.start(0, ["sinfo", "-h", "-o", "%T %D"], env=variables).communicate(timeout=10)[0]
            if listed.split() == ["idle", str(self.count)]:
                self._slurm_runs = True
                return variables
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm's machines are not idle: {listed}")
            time.sleep(0.2)

    def link(self, number: int, up: bool) -> None:
        """Take the cable of a machine out, or put it in."""
        _do("ip", "link", "set", f"swv{number}", "up" if up else "down", space="swnet")

    def wall(self, number: int, other: int, up: bool) -> None:
        """Keep packets of one machine from another; both still reach all others."""
        change = "add" if up else "del"
        _do("ip", "route", change, "unreachable", f"{self.address(other)}/32", space=self.space(number))

    def mount(self, number: int, source: Path, target: str) -> None:
        """Show a directory at another path to what ssh starts on a machine."""
        _do("nsenter", "-t", str(self._servers[number - 1].pid), "-m", "mount", "--bind", str(source), target)

    def unmount(self, number: int, target: str) -> None:
        """Undo `mount`."""
        _do("nsenter", "-t", str(self._servers[number - 1].pid), "-m", "umount", "-l", target)

    def throttle(self, number: int, rate: str = "") -> None:
        """Limit what a machine sends and receives, such as "100mbit"; without a rate nothing is limited."""
        for space, device in (("swnet", f"swv{number}"), (self.space(number), "eth0")):
            subprocess.run(
                ["ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True
            )
            if rate:
                rule = ("tbf", "rate", rate, "burst", "64k", "latency", "50ms")
                _do("tc", "qdisc", "add", "dev", device, "root", *rule, space=space)

    def delay(self, number: int, seconds: float) -> None:
        """Make each frame to or from a machine late; 0: as before. Frames are of 9,000 bytes then, to be few."""
        cable, ends, bridge = f"swv{number}", (f"swa{number}", f"swb{number}"), f"swd{number}"
        if (mover := self._movers.pop(number, None)) is not None:
            mover.kill()
            mover.wait()
            _do("ip", "link", "set", cable, "master", "swbr", space="swnet")
            _do("ip", "link", "del", bridge, space="swnet")
        size = ("mtu", "9000" if seconds else "1500")
        _do("ip", "link", "set", "eth0", *size, space=self.space(number))
        _do("ip", "link", "set", cable, *size, space="swnet")
        if not seconds:
            return
        # Machine, cable, bridge of its own, TAP devices of the mover, the bridge of all.
        command = ["ip", "netns", "exec", "swnet", sys.executable, "-m", "tests.machines.delay", str(seconds), *ends]
        mover = self._movers[number] = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert mover.stdout is not None
        if not mover.stdout.readline():
            raise RuntimeError("the delay does not start: is there no /dev/net/tun?")
        _do("ip", "link", "add", bridge, "type", "bridge", space="swnet")
        for device, master in ((cable, bridge), (ends[0], bridge), (ends[1], "swbr")):
            _do("ip", "link", "set", device, *size, "master", master, "up", space="swnet")
        _do("ip", "link", "set", bridge, "up", space="swnet")

    def drop(self, number: int, share: float) -> None:
        """Lose a share of the packets that a machine receives, from 0 to 1; needs iptables."""
        _do("iptables", "-F", "INPUT", space=self.space(number))
        if share:
            how = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            _do("iptables", "-A", "INPUT", "-i", "eth0", *how, "-j", "DROP", space=self.space(number))

    def processes(self, number: int) -> list[int]:
        """Return the processes of a machine, without its ssh server."""
        found = subprocess.run(["ip", "netns", "pids", self.space(number)], capture_output=True, text=True)
        servers = {process.pid for process in self._servers}
        alive = []
        for pid in map(int, found.stdout.split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if pid not in servers and command and not any(name in command for name in (b"sshd", b"slurm")):
                alive.append(pid)
        return alive

    def __enter__(self) -> Lab:
        # The names of the spaces are those of this computer: another lab ends first.
        self._lock = open("/run/lock/shardwise-machines", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._remove()
        try:
            self._keys()
            _do("ip", "netns", "add", "swnet")
            _do("ip", "link", "add", "swbr", "type", "bridge", space="swnet")
            _do("ip", "link", "set", "swbr", "up", space="swnet")
            for number in range(self.count + 1):
                self._add(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _keys(self) -> None:
        for name in ("key", "host_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        host = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        names = [(self.name(number), self.address(number)) for number in range(self.count + 1)]
        (self.folder / "known_hosts").write_text("".join(f"{name},{address} {host}\n" for name, address in names))
        (self.folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=self.folder))

    def _add(self, number: int) -> None:
        space, address = self.space(number), self.address(number)
        _do("ip", "netns", "add", space)
        _do("ip", "link", "add", f"swv{number}", "type", "veth", "peer", "name", "eth0", "netns", space, space="swnet")
        _do("ip", "link", "set", f"swv{number}", "master", "swbr", "up", space="swnet")
        _do("ip", "addr", "add", f"{address}/24", "dev", "eth0", space=space)
        _do("ip", "link", "set", "eth0", "up", space=space)
        _do("ip", "link", "set", "lo", "up", space=space)
        etc = Path("/etc/netns") / space
        etc.mkdir(parents=True, exist_ok=True)
        hosts = [f"{self.address(other)} {self.name(other)}\n" for other in range(self.count + 1)]
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        if number:
            config = self.folder / f"sshd-{number}"
            config.write_text(_SSHD_CONFIG.format(address=address, folder=self.folder, number=number))
            Path("/run/sshd").mkdir(exist_ok=True)
            (self.folder / f"home-{number}").mkdir()
            # Machines share no memory: each server has a /dev/shm of its own.
            script = f"hostname {self.name(number)} && mount -t tmpfs tmpfs /dev/shm && exec {SSHD} -D -e -f {config}"
            command = ["ip", "netns", "exec", space, "unshare", "-m", "-u", "sh", "-c", script]
            self._servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            deadline = time.monotonic() + 10
            while not (self.folder / f"sshd-{number}.pid").exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"sshd of machine {number} does not start")
                time.sleep(0.02)

    def _remove(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()
        self._servers = []
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for space in (line.split()[0] for line in listed.splitlines() if line.startswith(("swm", "swnet"))):
            for _ in range(100):
                pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
                if not pids:
                    break
                subprocess.run(["kill", "-9", *pids], check=False, capture_output=True)
                time.sleep(0.02)
            subprocess.run(["ip", "netns", "del", space], check=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)


def _do(*command: str, space: str | None = None) -> None:
    inside = [] if space is None else ["ip", "netns", "exec", space]
    done = subprocess.run([*inside, *command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
