"""Train among strangers who call every port of the job, and see that nothing they say counts.

    python -m tests.slow.hostile [--minutes 20] [--seed 0]

Two ranks train a model at stage 3 under `shardwise run`, again and again from the same beginning: each episode makes an
engine, so that the ranks meet anew, trains a few dozen steps in which units of 17 MiB are needed once more than agreed
(they are fetched over the side channel), and destroys the engine. Meanwhile another process looks for every TCP port
and every abstract Unix socket at which a process of the job listens, and calls it:

- garbage, HTTP, huge lengths, zeros, 0xff, connections that are reset, and connections that say nothing, or half of
  something, and are held, up to 100 a port;
- the handshake of the side channel with forged proofs, and with numbers that another port has given;
- the protocol of torch's store, where it is spoken: planted shards and messages, false words on where ranks are, large
  values. (Not the keys with which torch's process groups meet: whoever may write those can stop any job of torch.)

All parameters and optimizer state at the end of each episode, and all losses, must equal, bit by bit, those of a run
that nobody has disturbed. Results: bench/results/hostile.json.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import ROOT, options_of, resident, save

_FOLDER, _TARGET = "SHARDWISE_HOSTILE_FOLDER", "SHARDWISE_HOSTILE_TARGET"
WIDTH, STEPS = 2112, 20
HELD = 100
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}

# -- in the job --------------------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Train the same episode again and again until told to stop; rank 0 writes down what each has led to."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import shardwise
    from shardwise.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    class Model(nn.Module):
        """Its layers are called as often as the data say, which differs between ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            self.last = nn.Linear(WIDTH, 8)

        def forward(self, x: torch.Tensor, times: list[int]) -> torch.Tensor:
            for layer, count in zip(self.layers, times, strict=True):
                for _ in range(count):
                    x = torch.tanh(layer(x))
            return self.last(x).square().mean()

    def episode(rank: int) -> dict[str, Any]:
        began = time.perf_counter()
        torch.manual_seed(5)
        engine, *_ = shardwise.initialize(model=Model(), config=CONFIG)
        said, draw = hashlib.sha256(), random.Random(rank)
        generator = torch.Generator().manual_seed(rank)
        for number in range(STEPS):
            times = [draw.randint(1, 2 + number // 8) for _ in range(2)]
            loss = engine(torch.randn(2, WIDTH, generator=generator), times)
            if number % 3 == rank:  # what the backward pass needs first is fetched
                engine.empty_partition_cache()
            engine.backward(loss)
            engine.step()
            said.update(struct.pack("<d", float(loss.detach())))
        for name, parameter in engine.module.named_parameters():
            found = [safe_get_full_fp32_param(parameter)]
            found += [safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")]
            for tensor in found:
                assert tensor is not None, name
                said.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        rescues = engine.sharded.unsharder.late
        engine.destroy()
        gc.collect()
        size = resident()
        return {"bits": said.hexdigest(), "rescues": rescues, "s": time.perf_counter() - began, "resident": size}

    shardwise.init_distributed(verbose=False)
    rank = dist.get_rank()
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    with open(folder / f"episodes_{rank}", "a") as file:
        going_on = torch.ones(1)
        while going_on:
            file.write(json.dumps(episode(rank)) + "\n")
            file.flush()
            going_on.fill_(not (folder / "stop").exists())
            dist.broadcast(going_on, 0)
    dist.destroy_process_group()


# -- the strangers -----------------------------------------------------------------------------------------------------


def family(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, at = [root], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


Door = tuple[str, int]


def doors(pids: list[int]) -> tuple[set[Door], set[str]]:
    """Return the TCP addresses and the abstract Unix sockets at which processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    ports = set()
    for name, family_of in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                host = socket.inet_ntop(family_of, struct.pack(f"={len(words)}I", *words))
                ports.add(({"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host), int(port, 16)))
    names = set()
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        listens = int(fields[3], 16) & 0x10000
        if listens and fields[6] in inodes and len(fields) > 7 and fields[7].startswith("@"):
            names.add(fields[7][1:])
    return ports, names


class Strangers:
    """Whoever calls the ports of a job.

    Args:
        root: the job's first process.
        seed: of what they say.
    """

    def __init__(self, root: int, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.calls: Counter[str] = Counter()
        self.doors: set[Any] = set()
        self.held: dict[Any, list[socket.socket]] = {}
        self.heard = [bytes(32)]

    def lines(self) -> dict[str, Callable[[], bytes]]:
        """What is said to a TCP port and followed by hanging up."""
        rank, heard = struct.pack("<I", self.random.randrange(3)), self.random.choice(self.heard)
        return {
            "garbage": lambda: self.random.randbytes(self.random.randrange(1, 5000)),
            "http": lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "huge length": lambda: struct.pack(self.random.choice("<>") + "QQ", 1 << 40, 1 << 62),
            "json": lambda: b'{"kind": "fetch", "rank": 0, "unit": 99999}{"kind": "stop", "rank": 1}',
            "zeros": lambda: bytes(4096),
            "0xff": lambda: b"\xff" * 4096,
            "forged hello": lambda: rank + self.random.randbytes(64),
            "forged hello, heard number": lambda: rank + heard + self.random.randbytes(32),
            "replayed hello": lambda: rank + heard + heard,
            "forged fetch": lambda: struct.pack("<BIqq", 1, 0, 0, 1) * 10,
            "reset": lambda: b"",
        }

    def call_port(self, port: Door) -> None:
        """Say one thing of each kind to a port, and hold a connection."""
        for kind, line in self.lines().items():
            with contextlib.suppress(OSError), socket.create_connection(port, 1) as connection:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    if kind.endswith(("hello", "number")) and len(number := connection.recv(32)) == 32:
                        self.heard = [*self.heard[-50:], number]
                if kind == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(line())
                self.calls[kind] += 1
        with contextlib.suppress(OSError):
            connection = socket.create_connection(port, 1)
            self.hold(port, connection, self.random.choice([b"", b"\1", self.random.randbytes(30)]))

    def hold(self, door: Any, connection: socket.socket, said: bytes) -> None:
        """Say something and keep the connection."""
        held = self.held.setdefault(door, [])
        held.append(connection)
        if len(held) > HELD:
            held.pop(0).close()
        connection.setblocking(False)
        connection.send(said)
        self.calls["held"] += 1

    def call_unix(self, name: str) -> None:
        """Be the first at a Unix socket, with a rank's number or nothing."""
        for said in (b"", struct.pack("<I", 1), b"\xff" * 100):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):
                connection.settimeout(0.2)
                connection.connect("\0" + name)
                self.hold(name, connection, said)
                self.calls["unix"] += 1

    def call_store(self, port: Door) -> None:
        """Plant keys where torch's store is spoken, again and again; what speaks otherwise may never answer."""
        import torch.distributed as dist

        draw = random.Random(port[1])
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.TCPStore(*port, None, False, timedelta(seconds=5))
            while True:
                number = store.add("messages", 1)
                store.set(f"message/{number}", draw.choice(["not json", '{"kind": "stop", "rank": 1}', "[" * 5000]))
                for rank in range(2):
                    store.set(f"shard/{number}/0/{rank}", bytes(1 << 16))
                    word = {"state": draw.choice(["waits", "ended", "ends", 7]), "text": "is elsewhere", "peer": 9}
                    store.set(f"shardwise/whereabouts/0/{rank}", draw.choice([json.dumps(word), "\xff", "[]"]))
                store.set(f"large/{number % 8}", bytes(1 << 20))
                for old in (f"message/{number - 9}", *(f"shard/{number - 9}/0/{rank}" for rank in range(2))):
                    store.delete_key(old)
                self.calls["store"] += 1
                time.sleep(0.5)

    def run(self, stop: Path) -> dict[str, Any]:
        """Call until told to stop; return what has been done."""
        ports: set[Door] = set()

        def call_all() -> None:
            while not stop.exists():
                for port in sorted(ports):
                    self.call_port(port)
                time.sleep(0.2)

        threading.Thread(target=call_all, daemon=True).start()
        known, since = family(self.root), time.monotonic()
        while not stop.exists():
            if time.monotonic() - since > 1.0:
                known, since = family(self.root), time.monotonic()
            ports, names = doors(known)
            new = (ports | names) - self.doors
            self.doors |= new
            for name in names:
                self.call_unix(name)
            for port in ports & new:  # it may be open for a moment only
                self.call_port(port)
                threading.Thread(target=self.call_store, args=(port,), daemon=True).start()
            time.sleep(0.002)
        ports = {door for door in self.doors if isinstance(door, tuple)}
        return {"calls": dict(self.calls), "ports": len(ports), "unix_sockets": len(self.doors - ports)}


# -- the driver --------------------------------------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the job."""
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", "--no-local-rank", __file__]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, _FOLDER: str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with open(folder / "said", "w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment)


def end(job: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the end of the job; leave if it has failed."""
    if job.wait():
        sys.exit(f"the job has failed with code {job.returncode}:\n{(folder / 'said').read_text()[-8000:]}")


def episodes(folder: Path) -> list[list[dict[str, Any]]]:
    """Return what the ranks have written down."""
    return [[json.loads(line) for line in (folder / f"episodes_{rank}").read_text().splitlines()] for rank in range(2)]


def strangers_process(folder: Path, root: int, seed: int) -> subprocess.Popen[str]:
    """Start whoever disturbs the job: a process of its own, which leaves the processors to the job."""
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}
    environment |= {_FOLDER: str(folder), _TARGET: f"{root} {seed}"}
    command = ["nice", "-n", "10", sys.executable, __file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def attack(minutes: float, seed: int) -> dict[str, Any]:
    """Run the job undisturbed once, then disturbed for some minutes; return the figures."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardwise-hostile-") as place:
        whole, disturbed = Path(place) / "a", Path(place) / "b"
        for folder in (whole, disturbed):
            folder.mkdir()
        (whole / "stop").touch()
        end(start(whole), whole)
        job = start(disturbed)
        strangers = strangers_process(disturbed, job.pid, seed)  # they are there before the ranks
        try:
            limit = time.monotonic() + 60 * minutes
            while time.monotonic() < limit and job.poll() is None:
                time.sleep(0.5)
            (disturbed / "stop").touch()
            end(job, disturbed)
            told, _ = strangers.communicate(timeout=60)
        finally:
            strangers.kill()
        expected, found = episodes(whole), episodes(disturbed)
    bits = [{episode["bits"] for episode in rank} for rank in expected]
    wrong = sum(episode["bits"] not in bits[rank] for rank in range(2) for episode in found[rank])
    strange = json.loads(told)
    return {
        "system": "shardwise 3",
        "setting": {"seed": seed},
        "minutes": minutes,
        "episodes": len(found[0]),
        "steps": STEPS * len(found[0]),
        "rescues": sum(episode["rescues"] for rank in found for episode in rank),
        "calls": sum(strange["calls"].values()),
        "kinds": len(strange["calls"]),
        "ports": strange["ports"],
        "unix_sockets": strange["unix_sockets"],
        "episodes_that_differ": wrong,
        "undisturbed_s": expected[0][0]["s"],
        "worst_s": max(episode["s"] for episode in found[0]),
        "resident_mib": [round(found[0][at]["resident"] / 2**20) for at in (0, len(found[0]) // 2, -1)],
        "taken_s": time.perf_counter() - began,
    }


def main() -> None:
    """Be the job, the strangers or the driver."""
    if _TARGET in os.environ:
        root, seed = map(int, os.environ[_TARGET].split())
        print(json.dumps(Strangers(root, seed).run(Path(os.environ[_FOLDER]) / "stop")), flush=True)
        os._exit(0)  # threads may be waiting for an answer for ever
    if _FOLDER in os.environ:
        train(Path(os.environ[_FOLDER]))
        return
    options = options_of(__doc__, quick={"minutes": 0.5}, minutes=20.0, seed=0)
    result = attack(options.minutes, options.seed)
    save(options, "hostile", [result], command="python -m tests.slow.hostile " + " ".join(sys.argv[1:]))
    print(json.dumps(result, indent=1))
    if result["episodes_that_differ"] or not result["rescues"]:
        sys.exit("strangers have made a difference, or nothing was fetched")


if __name__ == "__main__":
    main()
