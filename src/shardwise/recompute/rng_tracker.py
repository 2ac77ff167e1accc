"""Random numbers of ranks that have a copy of a model among them, for layers that say themselves where they differ.

Megatron's interface: outside of `fork()` all ranks of a copy draw the same numbers, inside each draws its own. Models
that shardwise divides need none of it. States are those of the device's generator: of CUDA where it is used, else of
the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.errors import UsageError
from shardwise.parallel import current_tensors
from shardwise.recompute.settings import unit_of_script

MODEL_PARALLEL = "model-parallel-rng"
"""Name of the state with numbers of each rank's own."""

_APART = 2718
"""Between the seeds of all ranks and those of each rank, as Megatron has it."""


def _on_device() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if _on_device() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    (torch.cuda.set_rng_state if _on_device() else torch.set_rng_state)(state)


def _seed(seed: int) -> None:
    (torch.cuda.manual_seed if _on_device() else torch.manual_seed)(seed)


class CudaRNGStatesTracker:
    """States of the generator, by name; `fork` draws from one of them.

    Example:
        >>> tracker = CudaRNGStatesTracker()
        >>> tracker.add("own", 7)
        >>> with tracker.fork("own"):
        ...     own = torch.rand(2)
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of all states."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take states in place of all that there are."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from a seed; the generator stays as it is.

        Raises:
            UsageError: there is a state of this name, or from this seed.
        """
        if name in self._states or seed in self._seeds:
            what = f"a state named {name!r}" if name in self._states else f"a state from the seed {seed}"
            raise UsageError(f"CudaRNGStatesTracker.add({name!r}, {seed}): there is {what} already; reset() before")
        before = _state()
        _seed(seed)
        self._states[name] = _state()
        self._seeds.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw numbers from a state inside of the block, and go on where it was in the next one.

        Raises:
            UsageError: there is no state of this name.
        """
        if name not in self._states:
            raise UsageError(
                f"CudaRNGStatesTracker.fork({name!r}): there is no such state, but {sorted(self._states)}; call "
                "model_parallel_cuda_manual_seed(seed), or add() it"
            )
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return that of this process. `checkpoint` draws again from it what has been drawn before."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator alike on all ranks of a copy of the model, and the tracker's state differently.

    Which place this rank has is known from `configure(mpu_)`, from an engine, or from `tp_model_init`.

    Args:
        seed: of ranks that have a copy of the model among them; other copies may have others.
    """
    _TRACKER.reset()
    _seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + _APART + _place())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's state anew; the generator stays as it is."""
    before = _state()
    _seed(seed + _place())
    _TRACKER.set_states({**_TRACKER.get_states(), MODEL_PARALLEL: _state()})
    _set_state(before)


def _place() -> int:
    unit = unit_of_script()
    if unit is not None:
        name = "get_tensor_model_parallel_rank"
        return int(getattr(unit, name if hasattr(unit, name) else "get_model_parallel_rank")())
    group = current_tensors()
    return 0 if group is None else group.place


@contextmanager
def drawing_again(states: dict[str, torch.Tensor]) -> Iterator[None]:
    """Have the tracker be in these states inside of the block."""
    now = _TRACKER.get_states()
    _TRACKER.set_states(states)
    try:
        yield
    finally:
        _TRACKER.set_states(now)
