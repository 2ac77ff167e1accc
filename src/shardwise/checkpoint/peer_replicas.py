"""In-memory checkpoints: copies of the training state outside of the training processes, for recovery from failures.

Each rank writes its part, in the format of checkpoints, into a directory in memory (tmpfs), and with several nodes
sends it to a rank of another node. The copies of all ranks at one step are a version. The newest complete version and
the previous one are kept. The next one overwrites the older, because reusing pages costs less than allocating them.

Ranks agree after each step: collect, begin (hide the older version's directory), write, transfer, publish (rename).
Hence, once one node has published a version, the data of all exist. A version is complete if every rank's part is on
some node, which recovery checks because nodes may be lost. Recovery assembles a checkpoint, which is loaded into any
layout. A node fetches only files that its ranks read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint import manifest, manifestfile
from shardwise.checkpoint.agree import collective_step, on_first_rank
from shardwise.checkpoint.checksums import free_space
from shardwise.checkpoint.collect import RankSavePlan, TrainingState
from shardwise.checkpoint.listing import StateNumbers
from shardwise.checkpoint.places import counterparts
from shardwise.checkpoint.protocols import CheckpointedModel, Run
from shardwise.checkpoint.publish import CheckpointHeader, description_name, join, read_description, write_part
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.save import collected, versions
from shardwise.checkpoint.transfer import FileTransfer, Hold, exchange_files
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, NonFiniteStateError
from shardwise.registry import LogicalTensor
from shardwise.units import format_size
from shardwise.utils.logging import logger

VERSIONS = 2
"""Maximum number of versions at a time."""

_FACTS = "generation.json"
_PARTIAL = ".partial"
_RESTORED = "restored-"
_MARK = "shardwise.copies"
"""Marker file of a directory for copies, from which only directories of shardwise's names are removed."""
_NAME = re.compile(r"(\.step[0-9]+-[0-9a-f]{8}-[0-9]+\.partial|(restored-)?step[0-9]+-[0-9a-f]{8}-[0-9]+)")


@dataclass(frozen=True)
class Version:
    """The copies of one step: `name` of the directory on every node, `global_steps`, number of the state
    (`shardwise.checkpoint.listing`), `world` of ranks, and the nodes that have the part of each.
    """

    name: str
    steps: int
    sequence: int
    world: int
    places: dict[int, set[int]]

    @property
    def complete(self) -> bool:
        """Whether every rank's part is on some node."""
        return all(self.places.get(rank) for rank in range(self.world))


@dataclass(frozen=True)
class MemoryCopy:
    """Costs of the last copy on this rank at `global_steps` `steps`: seconds of blocked training, bytes of this rank's
    part, and bytes written for its own and other nodes.
    """

    steps: int
    seconds: float
    own_bytes: int
    held_bytes: int
    directory: str


def nodes_of(comm: Communicator, directory: str) -> list[list[int]]:
    """Return the ranks that share this directory, for every directory, in the order of their first ranks. They compare
    its content, because containers of one machine may have separate memory. Raises CheckpointError if some rank cannot
    use the directory.
    """
    what = f"checkpoint.memory_copies: meeting in {directory}"
    sign = os.path.join(directory, f".here-{secrets.token_hex(8)}")
    try:
        with collective_step(comm, what) as met:
            make_own(directory)
            with open(sign, "xb"):
                pass
            met.local = os.path.basename(sign)
        with collective_step(comm, what) as seen:
            there = set(os.listdir(directory))
            seen.local = next(rank for rank, name in enumerate(met.gathered) if name in there)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(sign)
    nodes: dict[int, list[int]] = {}
    for rank, first in enumerate(seen.gathered):
        nodes.setdefault(first, []).append(rank)
    return list(nodes.values())


def make_own(directory: str) -> None:
    """Make a directory that only this user can write to, with its marker, or check it. Safe for concurrent calls."""
    parent = os.path.dirname(os.path.abspath(directory))
    os.makedirs(parent, exist_ok=True)
    new = f"{directory}.{secrets.token_hex(4)}.new"
    os.mkdir(new, mode=0o700)
    mark = os.path.join(new, _MARK)
    try:
        with open(mark, "xb"):
            pass
        os.rename(new, directory)  # also replaces an empty one
    except OSError:  # it exists
        with contextlib.suppress(OSError):
            os.unlink(mark)
        os.rmdir(new)
    advice = "name a directory of the job's own in checkpoint.memory_copies.directory"
    above, found = os.stat(parent), os.lstat(directory)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise CheckpointError(
            f"{parent}: everybody can write to it (mode {stat.filemode(above.st_mode)}), and so replace copies of the "
            f"training state in it; {advice}, or set the sticky bit (chmod +t)"
        )
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CheckpointError(
            f"{directory}: belongs to user {found.st_uid} (mode {stat.filemode(found.st_mode)}), and copies of the "
            f"training state need a directory of user {os.geteuid()} that others cannot write to; remove it, or "
            f"{advice}"
        )
    if not os.path.isfile(os.path.join(directory, _MARK)):
        raise CheckpointError(
            f"{directory}: is there and was not made for copies of the training state (it has no file {_MARK!r}); "
            f"{advice}"
        )


class InMemoryCheckpoints:
    """Copies of one engine's state, and their recovery. All methods are collectives.

    `directory` of this node's copies is created if needed, and used by no other engine. A copy is made `every` steps
    and sent to `replicas` other nodes (the attribute is their effective number). `hold` accounts send buffers. `nodes`
    has the ranks of each node. Another `run` with the same directory does not resume from the copies. `check_finite`
    refuses to copy infinite or NaN values. `last` has the costs of the last copy, or None. Raises CheckpointError if
    some rank cannot use the directory.
    """

    def __init__(
        self,
        model: CheckpointedModel,
        directory: str,
        every: int,
        replicas: int,
        hold: Hold,
        numbers: StateNumbers | None = None,
    ) -> None:
        self.every = every
        self.path = directory
        self.last: MemoryCopy | None = None
        self.run: str | None = None
        self.check_finite = True
        self._model = model
        self._comm = model.comm
        self._hold = hold
        self._numbers = numbers or StateNumbers()
        self.nodes = nodes_of(self._comm, directory)
        self.node = next(number for number, ranks in enumerate(self.nodes) if self._comm.rank in ranks)
        self.replicas = min(replicas, len(self.nodes) - 1)
        self._leads = self.nodes[self.node][0] == self._comm.rank
        self._newest: str | None = None
        self._made: list[str] = []
        self._count = 0
        with collective_step(self._comm, "checkpoint.memory_copies") as named:
            named.local = secrets.token_hex(4)
        self._token = named.gathered[0]

    def _check_finite(self, names: list[str]) -> None:
        if names:
            raise NonFiniteStateError(
                "no copy is made in memory: values are infinite or NaN: "
                f"{manifest.outline(list(dict.fromkeys(names)))}. The newest copy without such values is still there"
            )

    # -- copying -----------------------------------------------------------------------------------------------------

    def copy(self, prepare: Callable[[], tuple[TrainingState, dict[str, Any]]]) -> MemoryCopy:
        """Copy the state. A collective. `prepare` returns state except tensors, and the manifest's layout and config.

        Raises:
            CheckpointError: the copy failed, on all ranks alike; the previous version remains.
            NonFiniteStateError: values are infinite or NaN.
        """
        comm = self._comm
        what = f"copying the training state into memory ({self.path})"
        began = time.perf_counter()
        file = _file_name(comm.rank, comm.world)
        draft = name = ""
        self._count += 1
        try:
            prepared: list[tuple[TrainingState, dict[str, Any]]] = []

            def state_now() -> TrainingState:
                prepared.append(prepare())
                return prepared[0][0]

            part, add = collected(self._model, file, state_now, frozenset(), self.check_finite, what)
            state, header = prepared[0]
            steps, number = state.counters["global_steps"], self._numbers.next()
            name = f"step{steps}-{self._token}-{self._count}"
            draft = os.path.join(self.path, f".{name}{_PARTIAL}")
            with collective_step(comm, what):
                if self._leads:
                    self._begin(draft)
                    self._remove(keep=(self._newest, os.path.basename(draft)))
            with collective_step(comm, what) as written:
                add()
                written.local = [self._write(part, draft, steps, number, header), part.not_finite]
            self._check_finite([name for entry in written.gathered for name in entry[1]])
            sizes: list[list[int]] = [entry[0] for entry in written.gathered]
            transfers = self._transfers(sizes)
            if transfers:
                with collective_step(comm, what):
                    self._ship(transfers, draft)
            with collective_step(comm, what):
                if self._leads:
                    os.rename(draft, os.path.join(self.path, name))
            draft = ""
        finally:
            if draft and self._leads:
                shutil.rmtree(draft, ignore_errors=True)
        self._newest = name
        self._numbers.copied(number, state.counters)
        self._made = [*self._made[-1:], name]
        own = sum(sizes[comm.rank])
        held = own + sum(transfer.size for transfer in transfers if transfer.dst == comm.rank)
        self.last = MemoryCopy(steps, time.perf_counter() - began, own, held, self.path)
        return self.last

    def _begin(self, draft: str) -> None:
        """Make the draft's directory from that of the older version, with files of the same names and sizes."""
        if len(self._made) == VERSIONS and self._made[0] != self._newest:
            with contextlib.suppress(OSError):  # removed by another process
                os.rename(os.path.join(self.path, self._made[0]), draft)
                return
        os.mkdir(draft)

    def _write(self, part: RankSavePlan, draft: str, steps: int, number: int, header: dict[str, Any]) -> list[int]:
        description = part.to_json()
        if self._comm.rank == 0:
            description["header"] = {**header, "optimizer": self._optimizer_name(), "created": time.time()}
        if self._leads:
            self._write_facts(draft, steps, number, self._comm.world)
        return write_part(
            draft, part.file, part.tensors, description, fetch=part.fetch, over=True, explain=self._unwritable
        )

    def _write_facts(self, folder: str, steps: int, number: int, world: int) -> None:
        with open(os.path.join(folder, _FACTS), "w", encoding="utf-8") as text:
            json.dump({"steps": steps, "sequence": number, "world": world, "run": self.run}, text)

    def _unwritable(self, error: OSError, path: str, file: str, size: int) -> CheckpointError:
        here = len(self.nodes[self.node]) * (1 + self.replicas)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
        fix = "Give it more room (docker: --shm-size), name" if full else "Name"
        return CheckpointError(
            f"{os.path.join(path, file)}: cannot be written: {error.strerror} (errno {error.errno}). This rank's part "
            f"takes {format_size(size)}; {VERSIONS} generations of {here} parts of about that size have to fit there, "
            f"{free_space(self.path)}. {fix} another directory in checkpoint.memory_copies.directory, or leave the "
            "section out"
        )

    def _optimizer_name(self) -> str | None:
        optimizer = self._model.optimizer
        return None if optimizer is None else type(optimizer).__name__

    def _transfers(self, sizes: list[list[int]]) -> list[FileTransfer]:
        found = []
        for number, ranks in enumerate(self.nodes):
            for away in range(1, self.replicas + 1):
                others = self.nodes[(number + away) % len(self.nodes)]
                for place, rank in enumerate(ranks):
                    file = _file_name(rank, self._comm.world)
                    target = others[place % len(others)]
                    names = (file, description_name(file))
                    found += [FileTransfer(n, size, rank, target) for n, size in zip(names, sizes[rank], strict=True)]
        return found

    def _ship(self, transfers: list[FileTransfer], draft: str) -> None:
        def path(name: str) -> str:
            return os.path.join(draft, name)

        exchange_files(self._comm, self._model.device, transfers, path, path, self._hold, over=True)

    def _remove(self, keep: tuple[str | None, ...]) -> None:
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if name not in keep and _NAME.fullmatch(name) and stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all copies of this node, after the last copy. A collective."""
        if self._leads:
            with contextlib.suppress(OSError):
                self._remove(keep=())
                if os.listdir(self.path) == [_MARK]:
                    os.unlink(os.path.join(self.path, _MARK))
                    os.rmdir(self.path)
        self._newest, self._made = None, []

    # -- finding -----------------------------------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """Return the complete versions, the newest first; the same on all ranks. A collective."""
        with collective_step(self._comm, f"looking for copies in memory ({self.path})") as looked:
            looked.local = list(self._on_this_node()) if self._leads else []
        found: dict[str, Version] = {}
        for number, ranks in enumerate(self.nodes):
            for name, steps, sequence, world, there in looked.gathered[ranks[0]]:
                one = found.setdefault(name, Version(name, steps, sequence, world, {}))
                for rank in there:
                    one.places.setdefault(rank, set()).add(number)
        complete = [one for one in found.values() if one.complete]
        for one in complete:
            self._numbers.see(one.sequence)
        return sorted(complete, key=lambda one: -one.sequence)

    def _on_this_node(self) -> Iterator[tuple[str, int, int, int, list[int]]]:
        for name in sorted(os.listdir(self.path)):
            if name == _MARK or name.startswith((".", _RESTORED)):
                continue
            try:
                with open(os.path.join(self.path, name, _FACTS), encoding="utf-8") as text:
                    facts = json.load(text)
                steps, sequence, world = int(facts["steps"]), int(facts["sequence"]), int(facts["world"])
                there = set(os.listdir(os.path.join(self.path, name)))
                run = facts["run"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s: passed over: %s", os.path.join(self.path, name), error)
                continue
            if run is not None and self.run is not None and run != self.run:
                logger.warning(
                    "%s: passed over: it is a copy of step %d of the run in %s, and this one is in %s; give each run a "
                    "directory of its own in checkpoint.memory_copies.directory",
                    os.path.join(self.path, name),
                    steps,
                    run,
                    self.run,
                )
                continue
            files = [_file_name(rank, world) for rank in range(world)]
            ranks = [rank for rank, file in enumerate(files) if file in there and description_name(file) in there]
            yield name, steps, sequence, world, ranks

    # -- recovery ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def assembled(self, version: Version) -> Iterator[str | None]:
        """Assemble a version to a checkpoint in the context; yield its directory, or None if all copies of some part
        are damaged. A collective. Bytes are compared with their checksums, and a damaged part is replaced by another
        node's copy.
        """
        places = {rank: set(nodes) for rank, nodes in version.places.items()}
        name = f"{_RESTORED}{version.name}"
        target = os.path.join(self.path, name)
        try:
            while all(places[rank] for rank in range(version.world)):
                try:
                    bad = self._assemble(version, places, target)
                except CheckpointError as error:  # on all ranks alike
                    if self._comm.rank == 0:
                        logger.warning("the copies of step %d in memory are not used: %s", version.steps, error)
                    break
                if not bad:
                    self._newest, self._made = version.name, []  # no resume from later versions
                    yield name
                    return
                for node, rank, reason in bad:
                    places[rank].discard(node)
                    if self._comm.rank == 0:
                        where = f"in the memory of the node of ranks {', '.join(map(str, self.nodes[node]))}"
                        logger.warning(
                            "rank %d's part of step %d %s is not used: %s", rank, version.steps, where, reason
                        )
            yield None
        finally:
            if self._leads:
                shutil.rmtree(target, ignore_errors=True)

    def spread(self, version: Version) -> None:
        """Copy the parts of a version that fewer nodes have than should, because nodes are lost, to others: the loss of
        another node before the next copy would end the version. A collective.
        """
        wanted, count = 1 + self.replicas, len(self.nodes)
        if all(len(version.places[rank]) >= wanted for rank in range(version.world)):
            return
        what = f"restoring the copies of step {version.steps} in memory ({self.path})"
        folder = os.path.join(self.path, version.name)
        with collective_step(self._comm, what) as sized:
            if self._leads:
                os.makedirs(folder, exist_ok=True)
                if not os.path.exists(os.path.join(folder, _FACTS)):
                    self._write_facts(folder, version.steps, version.sequence, version.world)
                here = [rank for rank in range(version.world) if self.node in version.places[rank]]
                files = {rank: _file_name(rank, version.world) for rank in here}
                sized.local = [
                    [rank, *(os.path.getsize(os.path.join(folder, name)) for name in (file, description_name(file)))]
                    for rank, file in files.items()
                ]
        sizes = {rank: size for entry in sized.gathered for rank, *size in entry or ()}
        transfers = []
        for rank in range(version.world):
            there = sorted(version.places[rank])
            giver, file = there[rank % len(there)], _file_name(rank, version.world)
            free = [node for away in range(1, count) if (node := (giver + away) % count) not in version.places[rank]]
            for node in free[: max(0, wanted - len(there))]:
                ends = self.nodes[giver][0], self.nodes[node][0]
                names = (file, description_name(file))
                transfers += [FileTransfer(n, size, *ends) for n, size in zip(names, sizes[rank], strict=True)]
        with collective_step(self._comm, what):
            self._ship(transfers, folder)

    def _assemble(self, version: Version, places: dict[int, set[int]], target: str) -> list[tuple[int, int, str]]:
        """Assemble a version; return (node, rank, reason) of damaged copies."""
        comm, device = self._comm, self._model.device
        what = f"putting together the copies of step {version.steps} in memory ({self.path})"
        joined, lost = self._joined(version, places, what)
        if joined is None:
            return [(min(places[rank]), rank, "its description is damaged") for rank in lost]
        with collective_step(comm, what) as requested:
            numbers = {_file_name(rank, version.world): rank for rank in range(version.world)}
            requested.local = sorted(numbers[file] for file in needed_files(self._model, joined))
        needed = [sorted(set().union(*(requested.gathered[rank] for rank in ranks))) for ranks in self.nodes]
        transfers, origin = self._fetches(version, places, joined, needed)
        with collective_step(comm, what):
            if self._leads:
                shutil.rmtree(target, ignore_errors=True)
                os.mkdir(target)
                with open(os.path.join(target, manifest.NAME), "xb") as stream:
                    stream.write(manifestfile.to_bytes(joined))
                for rank in needed[self.node]:
                    if origin[self.node, rank] == self.node:
                        file = _file_name(rank, version.world)
                        os.link(os.path.join(self.path, version.name, file), os.path.join(target, file))
        if transfers:
            with collective_step(comm, what):
                exchange_files(
                    comm,
                    device,
                    transfers,
                    lambda file: os.path.join(self.path, version.name, file),
                    lambda file: os.path.join(target, file),
                    self._hold,
                )
        with collective_step(comm, what) as checked:
            checked.local = [
                (origin[self.node, rank], rank, reason)
                for rank, reason in self._damaged(target, version.world, needed[self.node])
            ]
        return [(node, rank, reason) for entry in checked.gathered for node, rank, reason in entry]

    def _joined(
        self, version: Version, places: dict[int, set[int]], what: str
    ) -> tuple[manifest.Manifest | None, list[int]]:
        """Return the manifest, which the first rank has joined from the descriptions of all parts; None if some are
        damaged, with their ranks.
        """
        texts = {}
        for rank in range(version.world):
            if self._leads and min(places[rank]) == self.node:
                with contextlib.suppress(OSError, CheckpointError):
                    path = os.path.join(self.path, version.name)
                    texts[rank] = read_description(path, _file_name(rank, version.world)).decode()
        gathered = on_first_rank(self._comm, texts, "memory_copies")
        with collective_step(self._comm, what) as joined:
            if self._comm.rank == 0:
                parts = {int(rank): json.loads(text) for entry in gathered for rank, text in entry.items()}
                lost = [rank for rank in range(version.world) if rank not in parts]
                joined.local = lost or manifestfile.to_bytes(self._join(version, parts)).decode()
        found = joined.gathered[0]
        return (None, found) if isinstance(found, list) else (manifestfile.from_bytes(found.encode(), what), [])

    def _join(self, version: Version, parts: dict[int, dict[str, Any]]) -> manifest.Manifest:
        first = parts[0]["header"]
        header = CheckpointHeader(
            directory=self.path,
            tag=version.name,
            latest=False,
            world=version.world,
            versions=versions(),
            layout={"sequence": version.sequence, **first["layout"]},
            config=first["config"],
            optimizer=first["optimizer"],
            created=first["created"],
        )
        files = {
            _file_name(rank, version.world): manifest.FileFacts(part["facts"][0], tuple(part["facts"][1]))
            for rank, part in parts.items()
        }
        return join(header, [parts[rank] for rank in range(version.world)], files)

    def _fetches(
        self,
        version: Version,
        places: dict[int, set[int]],
        joined: manifest.Manifest,
        needed: list[list[int]],
    ) -> tuple[list[FileTransfer], dict[tuple[int, int], int]]:
        """Return the transfers between nodes, and for (node, part) the node of the copy used there."""
        transfers: list[FileTransfer] = []
        origin: dict[tuple[int, int], int] = {}
        for number, ranks in enumerate(self.nodes):
            for rank in needed[number]:
                if number in places[rank]:
                    origin[number, rank] = number
                    continue
                origin[number, rank] = giver = min(places[rank])
                givers = self.nodes[giver]
                transfers.append(
                    FileTransfer(
                        _file_name(rank, version.world),
                        joined.files[_file_name(rank, version.world)].size,
                        givers[rank % len(givers)],
                        ranks[rank % len(ranks)],
                    )
                )
        return transfers, origin

    def _damaged(self, target: str, world: int, ranks: list[int]) -> list[tuple[int, str]]:
        members = self.nodes[self.node]
        place = members.index(self._comm.rank)
        found = []
        with Checkpoint(target) as saved:
            for rank in ranks:
                file = _file_name(rank, world)
                try:
                    saved.check_sizes([file])
                    count = len(saved.manifest.files[file].checksums)
                    saved.verify([(file, block) for block in range(count)][place :: len(members)])
                except CheckpointError as error:
                    found.append((rank, str(error)))
        return found


def needed_files(model: CheckpointedModel, joined: manifest.Manifest) -> set[str]:
    """Return the files that this rank reads when it loads a checkpoint into a model."""
    values = model.value_runs()
    held: dict[str, list[tuple[LogicalTensor, list[Run]]]] = {}
    for index, runs in values.items():
        if runs:
            held.setdefault(model.registry[index].name, []).append((model.registry[index], runs))
    files: set[str] = set()
    for stored in joined.tensors:
        if stored.kind == manifest.BUFFER:
            files.update(part.file for part in stored.slices)
            continue
        for tensor, runs in held.get(stored.name, ()):
            if stored.shape == tensor.global_shape:
                own = stored.part(model.box_of(tensor))
                for start, stop, _ in runs:
                    files.update(part.file for part, _ in own.runs(start, stop))
            else:
                files.update(part.file for part in stored.slices)
    there = counterparts(joined, model.place, model.comm.rank, model.comm.world)
    near = min(there.line, default=0)
    states = [joined.ranks[rank] for rank in (near if there.own is None else there.own, near)]
    trees = [joined.optimizer, joined.scheduler, joined.scaler, joined.extra, joined.client, states]
    files.update(_referred(trees))
    return files


def _referred(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if tree.keys() == {"file", "key"} and isinstance(tree["file"], str):
            yield tree["file"]
        for value in tree.values():
            yield from _referred(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _referred(value)


def _file_name(rank: int, world: int) -> str:
    return f"rank{rank:05d}of{world:05d}.safetensors"
