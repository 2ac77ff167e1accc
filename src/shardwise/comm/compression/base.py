"""Base of lossy gradient reductions: buffers, exchanges, error feedback, and the state in checkpoints.

All ranks reduce a unit once per reducing backward pass, in one order, with any number of collectives of the kind
"reduce". The error feedback state (gradients not sent yet) belongs to one rank, and is saved with that rank's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator, Handle
    from shardwise.comm.native import PendingCollective


@dataclass(frozen=True)
class Flat:
    """The gradients of one flat parameter.

    Attributes:
        name: the same on all ranks and in every run; names the error feedback state.
        full: gradients of this rank, 1-D, world * S elements, with zeros between parameters; may be overwritten.
        own: receives the sum over ranks of this rank's range: S elements, in the dtype of sums.
        whole: receives the whole sum if every rank keeps it (`own` is a view of it); else None.
        shapes: first element and shape of each parameter in `full`.
    """

    name: str
    full: torch.Tensor
    own: torch.Tensor
    whole: torch.Tensor | None
    shapes: Sequence[tuple[int, torch.Size]]


class Kept:
    """Tensors kept between reductions, by name, each at the scale of the last reduction; `hold` counts each.

    >>> kept = Kept(torch.device("cpu"), lambda tensor: None)
    >>> kept.at("error", 2, torch.float32, scale=1.0).fill_(3.0)
    tensor([3., 3.])
    >>> kept.at("error", 2, torch.float32, scale=2.0)
    tensor([6., 6.])
    """

    def __init__(self, device: torch.device, hold: Callable[[torch.Tensor], None]) -> None:
        self._device = device
        self._hold = hold
        self.tensors: dict[str, torch.Tensor] = {}
        self._scales: dict[str, float] = {}

    def at(self, name: str, numel: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Return the 1-D tensor of a name, multiplied to a scale; at first, and if it had another size, zeros."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.numel() != numel:
            tensor = self.put(name, torch.zeros(numel, dtype=dtype, device=self._device))
        elif self._scales.get(name, scale) != scale:
            tensor.mul_(scale / self._scales[name])
        self._scales[name] = scale
        return tensor

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Keep and return a tensor that has no scale."""
        self._hold(tensor)
        self.tensors[name] = tensor
        return tensor

    def clean(self) -> None:
        """Replace non-finite values by zeros."""
        for tensor in self.tensors.values():
            torch.nan_to_num_(tensor, 0.0, 0.0, 0.0)

    def drop(self, chosen: Callable[[str], bool]) -> None:
        """Release the tensors of some names."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not chosen(name)}
        self._scales = {name: scale for name, scale in self._scales.items() if not chosen(name)}

    def clear(self) -> None:
        self.tensors, self._scales = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves (not copies) and their scales."""
        return {"tensors": dict(self.tensors), "scales": dict(self._scales)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load copies of saved tensors."""
        self.clear()
        for name, tensor in state["tensors"].items():
            self.put(name, tensor.to(self._device, copy=True))
        self._scales = dict(state["scales"])


class Compressor:
    """Base of the methods of lossy reduction; the first `start` steps are reduced exactly.

    `hold` counts a buffer until it is released. `steps` counts ended steps, with skipped ones; `kept` is the error
    feedback state. Buffers begin as zeros if `zeroed`, because messages are not filled, or are read in a dry run.
    """

    zeroed = True

    def __init__(self, comm: Communicator, start: int, hold: Callable[[torch.Tensor], None]) -> None:
        self.comm, self.start, self.hold = comm, start, hold
        self.steps = 0
        self.kept = Kept(comm.device, hold)

    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        """Launch the reduction of one unit: `own` (and `whole`) = (itself if `accumulate` else 0) + sum over ranks.

        A non-finite value on some rank must make a sum of some rank non-finite: ranks then agree on skipping the step.
        The first reduction in a step does not accumulate. `scale` divides a sum over ranks to give the gradient that is
        stepped, with loss scale, micro-batches and ranks; state from another scale must be multiplied to this one.
        `wire_dtype` is the configured dtype of sent values; None: the method chooses.
        """
        raise NotImplementedError

    def buffer(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a counted buffer."""
        make = torch.zeros if self.zeroed else torch.empty
        made = make(shape, dtype=dtype, device=self.comm.device)
        self.hold(made)
        return made

    def exchange(self, sent: torch.Tensor, label: str, comm: Communicator | None = None) -> tuple[torch.Tensor, Handle]:
        """Launch an all-to-all of equal messages; return the received ones, and the collective."""
        comm = comm or self.comm
        received, sizes = self.buffer(*sent.shape), [sent.numel() // comm.world] * comm.world
        return received, comm.all_to_all(received.view(-1), sent.view(-1), sizes, sizes, label, kind="reduce")

    @property
    def active(self) -> bool:
        """Whether the next reductions are compressed (the same on all ranks)."""
        return self.steps >= self.start

    def end_step(self, applied: bool) -> None:
        """Count a step; make the state finite if the step was skipped because of an overflow (not `applied`)."""
        self.steps += 1
        if not applied:
            self.kept.clean()

    def state_dict(self) -> dict[str, Any]:
        """Return the error feedback state of this rank: tensors and plain values."""
        return self.kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state saved under the same layout and by the same method."""
        self.kept.load_state_dict(state)

    def clear(self) -> None:
        """Release the state."""
        self.kept.clear()


class Configured(Compressor):
    """Base of the methods with a section of the configuration, `parameters`."""

    def __init__(self, parameters: Any, comm: Communicator, hold: Callable[[torch.Tensor], None]) -> None:
        super().__init__(comm, parameters.start_compressing_after_step, hold)
        self.parameters = parameters


class Running:
    """A reduction under way; `finish` may launch and wait for more. `scratch` is held until `pending` is complete."""

    def __init__(
        self, pending: PendingCollective, finish: Callable[[], None], scratch: Sequence[torch.Tensor] = ()
    ) -> None:
        self.scratch = [*scratch, *pending.scratch]
        self._rest: tuple[PendingCollective, Callable[[], None]] | None = pending, finish

    @property
    def completed(self) -> bool:
        """Whether `wait` has been called."""
        return self._rest is None

    def wait(self) -> None:
        """Block until the sums are in place; later calls do nothing."""
        if self._rest is not None:
            (pending, finish), self._rest = self._rest, None
            pending.wait()
            self.scratch = []
            finish()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are kept and compressed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
