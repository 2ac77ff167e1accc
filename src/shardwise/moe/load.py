"""Expert utilization: choices are counted on the device on request, and read asynchronously."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.moe.exchange import ExpertParallelModule


class ExpertUtilization:
    """Fraction of this rank's tokens for each expert of each layer, counted until `close()`.

    The host does not wait: `events` returns device tensors, which the monitor reads when they have arrived.

    Example:
        >>> from torch import nn
        >>> from shardwise.moe import ExpertUtilization, MoE
        >>> model = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2))
        >>> load = ExpertUtilization(model)
        >>> _ = model(torch.ones(6, 4))
        >>> [(name, float(part)) for name, part, _ in load.events(0)][0][0]
        'Train/Experts/0/0'
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {
            path: module for path, module in model.named_modules() if isinstance(module, ExpertParallelModule)
        }
        for module in self._layers.values():
            module.counts = None
            module.counting = True

    def counts(self) -> dict[str, torch.Tensor]:
        """Return the choices of each layer's experts since the last call, and reset."""
        found = {}
        for path, module in self._layers.items():
            if module.counts is not None:
                found[path] = module.counts
                module.counts = None
        return found

    def events(self, step: int, prefix: str = "Train/Experts/") -> list[tuple[str, torch.Tensor, int]]:
        """Return events for `engine.monitor.write_events`: each expert's fraction of the choices since the last call.

        `step` is the step of the events, such as `engine.global_samples`. Names are `prefix`, layer and expert.
        """
        found = []
        for path, counts in self.counts().items():
            parts = counts.double() / counts.sum().clamp(min=1)
            found += [(f"{prefix}{path}/{expert}", part, step) for expert, part in enumerate(parts.unbind())]
        return found

    def close(self) -> None:
        """Stop counting."""
        for module in self._layers.values():
            module.counting = False
            module.counts = None
