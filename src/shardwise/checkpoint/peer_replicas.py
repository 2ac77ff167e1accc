"""In-memory checkpoints: copies of the training state outside of the training processes, for recovery from failures.

A copy is a save into a directory in memory (tmpfs): each rank writes the file and description of a checkpoint's save,
and with several nodes sends both to a rank of another node. The copies of all ranks at one step are a version. The
newest complete version and the previous one are kept. The next one overwrites the older, because reusing pages costs
less than allocating them.

Ranks agree after each step: collect, begin (hide the older version's directory), write, transfer, publish (rename).
Hence, once one node has published a version, the data of all exist. A version is complete if every rank's part is on
some node, which recovery checks because nodes may be lost. Recovery verifies all copies, joins the manifest (at each
copy that would cost seconds), and lets each node fetch the files that its ranks read. Then the version's directory is
loaded as any checkpoint, into any layout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.checkpoint import manifest, manifestfile, nested_json, save
from shardwise.checkpoint.agree import collective_step, on_first_rank
from shardwise.checkpoint.collect import RankSavePlan, TrainingState, add_replicated, collected
from shardwise.checkpoint.listing import StateNumbers
from shardwise.checkpoint.places import counterparts
from shardwise.checkpoint.protocols import CheckpointedModel, Run
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.transfer import FileTransfer, Hold, exchange_files
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, NonFiniteStateError
from shardwise.registry import LogicalTensor
from shardwise.utils.logging import logger

VERSIONS = 2
"""Maximum number of versions at a time."""

_PARTIAL = ".partial"
_MARK = "shardwise.copies"
"""Marker file of a directory for copies, from which only directories of shardwise's names are removed."""
_NAME = re.compile(
    r"\.?step(?P<steps>\d+)-(?P<sequence>\d+)-(?P<world>\d+)-(?P<run>[0-9a-f]*)-[0-9a-f]{8}(?P<partial>\.partial)?"
)
_TOKEN = "copy"
"""Last part of the names of files, the same in all versions, because they are overwritten in place."""


@dataclass(frozen=True)
class Version:
    """The copies of one step: `name` of the directory on every node, `global_steps`, number of the state
    (`shardwise.checkpoint.listing`), `world` of ranks, the nodes that have the part of each, and the sizes of a part's
    files, where they are known.
    """

    name: str
    steps: int
    sequence: int
    world: int
    places: dict[int, set[int]]
    sizes: dict[int, list[int]] = field(default_factory=dict)


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
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, mode=0o700)
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
    mark = os.path.join(directory, _MARK)
    if not os.listdir(directory):
        os.chmod(directory, 0o700)
        with open(mark, "wb"):
            pass
    if not os.path.isfile(mark):
        raise CheckpointError(
            f"{directory}: is there and was not made for copies of the training state (it has no file {_MARK!r}); "
            f"{advice}"
        )


class InMemoryCheckpoints:
    """Copies of one engine's state, and their recovery. All methods are collectives.

    `directory` of this node's copies is created if needed, and used by no other engine. A copy is made `every` steps
    and sent to `replicas` other nodes (the attribute is their effective number). `hold` accounts send buffers. `nodes`
    has the ranks of each node. `run` is the directory that was resumed from; copies of another one, or of none, are
    passed over. `check_finite`
    refuses to copy infinite or NaN values. `last` has the costs of the last copy, or None. Raises CheckpointError if
    some rank cannot use the directory.
    """

    def __init__(
        self, model: CheckpointedModel, directory: str, every: int, replicas: int, hold: Hold, numbers: StateNumbers
    ) -> None:
        self.every = every
        self.path = directory
        self.last: MemoryCopy | None = None
        self.run: str | None = None
        self.check_finite = True
        self._model = model
        self._comm = model.comm
        self._hold = hold
        self._numbers = numbers
        self.nodes = nodes_of(self._comm, directory)
        self._home = {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}
        self.node = self._home[self._comm.rank]
        self.replicas = min(replicas, len(self.nodes) - 1)
        self._leads = self.nodes[self.node][0] == self._comm.rank
        self._newest: str | None = None
        self._made: list[str] = []
        with collective_step(self._comm, "checkpoint.memory_copies") as named:
            named.local = secrets.token_hex(4)
        self._token = named.gathered[0]

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
        file = save.file_name(comm.rank, comm.world, _TOKEN)
        draft = ""
        try:
            prepared = functools.cache(prepare)  # called in a step in which all ranks succeed or raise
            part = collected(self._model, file, lambda: prepared()[0], frozenset(), self.check_finite, what)
            state, header = prepared()
            counters, number = state.counters, self._numbers.next()
            steps = counters["global_steps"]
            name = f"step{steps}-{number}-{comm.world}-{_digest(self.run)}-{self._token}"
            draft = f".{name}{_PARTIAL}"
            with collective_step(comm, what):
                if self._leads:
                    self._begin(draft)
                    self._remove(keep=(self._newest, draft))
            with collective_step(comm, what) as written:
                add_replicated(part, self._model)
                request = save.SaveRequest(self.path, name, latest=False, numbers=self._numbers, **header)
                written.local = [self._write(part, draft, request), part.not_finite[: save.MOST_NAMES]]
            if names := dict.fromkeys(name for entry in written.gathered for name in entry[1]):
                raise NonFiniteStateError(
                    f"no copy is made in memory: values are infinite or NaN: {manifest.outline(list(names))}. The "
                    "newest copy without such values is still there"
                )
            sizes = {rank: entry[0] for rank, entry in enumerate(written.gathered)}
            homes = {rank: {node} for rank, node in self._home.items()}
            transfers = self._spread(Version(draft, steps, number, comm.world, homes, sizes), what)
            with collective_step(comm, what):
                if self._leads:
                    os.rename(self._at(draft), self._at(name))
            draft = ""
        finally:
            if draft and self._leads:
                shutil.rmtree(self._at(draft), ignore_errors=True)
        self._newest = name
        self._numbers.copied(name, number, counters)
        self._made = [*self._made[-1:], name]
        own = sum(sizes[comm.rank])
        held = own + sum(transfer.size for transfer in transfers if transfer.dst == comm.rank)
        self.last = MemoryCopy(steps, time.perf_counter() - began, own, held, self.path)
        return self.last

    def _at(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def _begin(self, draft: str) -> None:
        """Make the draft's directory from that of the older version, with files of the same names and sizes."""
        if len(self._made) == VERSIONS and self._made[0] != self._newest:
            with contextlib.suppress(OSError):  # removed by another process
                os.rename(self._at(self._made[0]), self._at(draft))
                return
        os.mkdir(self._at(draft))

    def _write(self, part: RankSavePlan, draft: str, request: save.SaveRequest) -> list[int]:
        description = part.to_json()
        if self._comm.rank == 0:
            description["header"] = vars(save.header_of(self._model, request))
        parts = len(self.nodes[self.node]) * (1 + self.replicas)
        fix = (
            f"{VERSIONS} generations of {parts} parts of about that size have to fit there. Give it more room (docker: "
            "--shm-size), name another directory in checkpoint.memory_copies.directory, or leave the section out"
        )
        path, file = self._at(draft), part.file
        return save.write_part(path, file, part.tensors, description, fetch=part.fetch, over=True, fix=fix)

    def _spread(self, version: Version, what: str) -> list[FileTransfer]:
        """Send parts until as many nodes have each as should, and record these nodes."""
        count, places = len(self.nodes), version.places
        wanted: list[set[int]] = [set() for _ in self.nodes]
        for part, there in places.items():
            home = sorted(there)[part % len(there)]
            others = [node for away in range(1, count) if (node := (home + away) % count) not in there]
            for node in others[: max(0, 1 + self.replicas - len(there))]:
                wanted[node].add(part)
        transfers = self._send(version, wanted, what)
        for node, some in enumerate(wanted):
            for part in some:
                places[part].add(node)
        return transfers

    def _send(self, version: Version, wanted: Sequence[set[int]], what: str) -> list[FileTransfer]:
        """Send each node the wanted parts that it lacks, from and to the ranks with the least to send and receive."""
        busy: Counter[int] = Counter()
        places = version.places
        transfers = []
        for node, some in enumerate(wanted):
            for part in sorted(part for part in some if node not in places[part]):
                giver = sorted(places[part])[part % len(places[part])]
                for file, size in zip(_files(part, version.world), version.sizes[part], strict=True):
                    src, dst = (min(self.nodes[end], key=busy.__getitem__) for end in (giver, node))
                    busy.update({src: size, dst: size})
                    transfers.append(FileTransfer(file, size, src, dst))
        if transfers:
            with collective_step(self._comm, what):
                exchange_files(self._comm, self._model.device, transfers, self._at(version.name), self._hold)
        return transfers

    def _remove(self, keep: tuple[str | None, ...]) -> None:
        for name in os.listdir(self.path):
            path = self._at(name)
            if name not in keep and _NAME.fullmatch(name) and stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all copies of this node, after the last copy. A collective."""
        if self._leads:
            with contextlib.suppress(OSError):
                self._remove(keep=())
                if os.listdir(self.path) == [_MARK]:
                    os.unlink(self._at(_MARK))
                    os.rmdir(self.path)
        self._newest, self._made = None, []

    # -- recovery ----------------------------------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """Return the complete versions, the newest first; the same on all ranks. A collective."""
        with collective_step(self._comm, f"looking for copies in memory ({self.path})") as looked:
            looked.local = list(self._on_this_node()) if self._leads else []
        found: dict[str, Version] = {}
        for node, ranks in enumerate(self.nodes):
            for name, steps, sequence, world, parts in looked.gathered[ranks[0]]:
                one = found.setdefault(name, Version(name, steps, sequence, world, {n: set() for n in range(world)}))
                for part in parts:
                    one.places[part].add(node)
        complete = [one for one in found.values() if all(one.places.values())]
        for one in complete:
            self._numbers.see(one.sequence)
        return sorted(complete, key=lambda one: -one.sequence)

    def _on_this_node(self) -> Iterator[tuple[str, int, int, int, list[int]]]:
        for name in sorted(os.listdir(self.path)):
            facts = _NAME.fullmatch(name)
            if facts is None or facts["partial"]:
                continue
            steps, sequence, world = (int(facts[key]) for key in ("steps", "sequence", "world"))
            if self.run is not None and facts["run"] != _digest(self.run):
                logger.warning(
                    f"{self._at(name)}: passed over: it is a copy of step {steps} of a run that had not called "
                    f"engine.resume({self.run!r}). Call it before the training loop, and give each run a directory of "
                    "its own in checkpoint.memory_copies.directory"
                )
                continue
            there = set(os.listdir(self._at(name)))
            yield name, steps, sequence, world, [rank for rank in range(world) if there.issuperset(_files(rank, world))]

    @contextlib.contextmanager
    def assembled(self, version: Version) -> Iterator[str | None]:
        """Make a version's directory a checkpoint in the context; yield its name, or None if all copies of some part
        are damaged. A collective. Damaged copies are replaced by those of other nodes. After the context, parts that
        fewer nodes have than should, because nodes are lost, are sent to others: the loss of another node before the
        next copy would end the version.
        """
        what = f"putting together the copies of step {version.steps} in memory ({self.path})"
        before = self._files_of(version)
        try:
            try:
                version = self._sound(version, what)
                self._complete(version, what)
            except CheckpointError as error:  # on all ranks alike
                self._warn(f"the copies of step {version.steps} in memory are not used: {error}")
                yield None
                return
            self._newest, self._made = version.name, []  # no resume from later versions
            yield version.name
            self._numbers.copies = {version.name}
            try:
                self._spread(version, what)
            except CheckpointError as error:  # on all ranks alike; training needs no further copies
                self._warn(str(error))
        finally:
            here = [part for part, there in version.places.items() if self.node in there]
            kept = before.union(*(_files(part, version.world) for part in here))
            for file in self._files_of(version) - kept if self._leads else ():
                os.unlink(self._at(version.name, file))

    def _files_of(self, version: Version) -> set[str]:
        with contextlib.suppress(FileNotFoundError):  # a node that has not had this version
            return set(os.listdir(self._at(version.name)))
        return set()

    def _warn(self, message: str) -> None:
        if self._comm.rank == 0:
            logger.warning(message)

    def _sound(self, version: Version, what: str) -> Version:
        """Verify all copies; return the version with the nodes of sound copies only, and the sizes of files."""
        ranks = self.nodes[self.node]
        held = [part for part, there in version.places.items() if self.node in there]
        with collective_step(self._comm, what) as checked:
            if self._leads:
                os.makedirs(self._at(version.name), exist_ok=True)
            mine = held[ranks.index(self._comm.rank) :: len(ranks)]
            checked.local = [[part, *_checked(self._at(version.name), *_files(part, version.world))] for part in mine]
        places: dict[int, set[int]] = {part: set() for part in version.places}
        sizes: dict[int, list[int]] = {}
        for rank, rows in enumerate(checked.gathered):
            for part, size, damage in rows:
                if damage is None:
                    places[part].add(self._home[rank])
                    sizes[part] = size
                else:
                    where = ", ".join(map(str, self.nodes[self._home[rank]]))
                    self._warn(
                        f"rank {part}'s part of step {version.steps} in the memory of the node of ranks {where} is not "
                        f"used: {damage}"
                    )
        lost = [f"rank {part}" for part, there in places.items() if not there]
        if lost:
            raise CheckpointError(f"no copy is whole of the part of {manifest.outline(lost)}")
        return replace(version, places=places, sizes=sizes)

    def _complete(self, version: Version, what: str) -> None:
        """Add to this node's directory the manifest, which the first rank joins, and files that its ranks read."""
        files = [_files(part, version.world) for part in range(version.world)]
        with collective_step(self._comm, what):
            here = [part for part, there in version.places.items() if self._leads and min(there) == self.node]
            known = {part: json.loads(save.read_description(self._at(version.name), files[part][0])) for part in here}
        gathered = on_first_rank(self._comm, known, "memory_copies")
        with collective_step(self._comm, what) as joined:
            if self._comm.rank == 0:
                described = {int(part): description for entry in gathered for part, description in entry.items()}
                header = manifest.Manifest(**described[0]["header"])
                made = save.join(header, {file: described[part] for part, (file, _) in enumerate(files)})
                joined.local = manifestfile.to_bytes(made).decode()
        text = joined.gathered[0].encode()
        with collective_step(self._comm, what) as requested:
            if self._leads:
                with open(self._at(version.name, manifest.NAME), "wb") as stream:
                    stream.write(text)
            numbers = {file: part for part, (file, _) in enumerate(files)}
            needed = needed_files(self._model, manifestfile.from_bytes(text, what))
            requested.local = sorted(numbers[file] for file in needed)
        wanted = [set().union(*(requested.gathered[rank] for rank in ranks)) for ranks in self.nodes]
        self._send(version, wanted, what)


def _checked(folder: str, file: str, description: str) -> tuple[list[int], str | None]:
    """Compare a part's bytes with its checksums; return the sizes of its files, and the damage or None."""
    try:
        facts = save.facts_of(json.loads(save.read_description(folder, file)))
        with Checkpoint(folder, manifest.Manifest("", 0.0, {}, {}, {}, {file: facts}, [])) as saved:
            saved.check()
        return [os.path.getsize(os.path.join(folder, name)) for name in (file, description)], None
    except (OSError, CheckpointError) as error:
        return [], str(error)


def needed_files(model: CheckpointedModel, joined: manifest.Manifest) -> set[str]:
    """Return the files that this rank reads when it loads a checkpoint into a model."""
    owner = manifest.by_any_name(joined.of_kind(manifest.PARAMETER))
    held: dict[str, list[tuple[LogicalTensor, list[Run]]]] = {}
    for index, runs in model.value_runs().items():
        tensor = model.registry[index]
        name = next((owner[name].name for name in (tensor.name, *tensor.aliases) if name in owner), tensor.name)
        if runs:
            held.setdefault(name, []).append((tensor, runs))
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
    needed = {min(there.line, default=0), there.own, there.random} - {None}
    states = [state for rank, state in enumerate(joined.ranks) if rank in needed]
    trees = replace(joined, ranks=states).trees()
    return files.union(reference["file"] for reference in nested_json.references(trees))


def _files(part: int, world: int) -> tuple[str, str]:
    """Return the names of the tensors and of the description of a rank's part."""
    file = save.file_name(part, world, _TOKEN)
    return file, save.description_name(file)


def _digest(run: str | None) -> str:
    return "" if run is None else hashlib.blake2b(os.fsencode(run), digest_size=8).hexdigest()
