"""RNG state tracker of a tensor-parallel group, with Megatron's interface.

Outside of `fork()` all ranks of the group draw the same numbers; inside, each rank draws its own. Models that shardwise
shards do not need it. States are of the CUDA generator if CUDA is in use, else of the CPU generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.errors import UsageError
from shardwise.parallel import current_tensors
from shardwise.recompute.settings import unit_of_script

MODEL_PARALLEL = "model-parallel-rng"  # name of the rank-specific state

_SEED_OFFSET = 2718  # offset between the common seed and the rank-specific seeds, as in Megatron


def _on_device() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if _on_device() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    (torch.cuda.set_rng_state if _on_device() else torch.set_rng_state)(state)


def _seed(seed: int) -> None:
    (torch.cuda.manual_seed if _on_device() else torch.manual_seed)(seed)


class CudaRNGStatesTracker:
    """Named RNG states; `fork` draws from one of them.

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
        """Remove all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of all states."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state from a seed, without changing the generator; raises a UsageError if name or seed exist."""
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
        """Draw numbers from a state inside the block, continuing its sequence; raises a UsageError without it."""
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
    """Return this process's tracker. `checkpoint` restores its states for the recomputation."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator equally on all ranks of the tensor-parallel group, and the tracker's state differently.

    This rank's place comes from `configure(mpu_)`, an engine, or `tp_model_init`. Other groups may have other seeds.
    """
    _TRACKER.reset()
    _seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + _SEED_OFFSET + _place())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's state anew, without changing the generator."""
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
    """Set the tracker to the given states inside the block."""
    now = _TRACKER.get_states()
    _TRACKER.set_states(states)
    try:
        yield
    finally:
        _TRACKER.set_states(now)
