"""Runtime of a pipeline rank: executes the actions of a schedule.

A rank has one or more stages. It receives the messages of each link in the order in which the peer sends them, and
sends each message when the action says so; `shardwise.pipeline.schedules` makes the actions. Outputs and gradients are
kept per stage and micro-batch, from the action that makes them to the last that reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.comm.communicator import Communicator
from shardwise.comm.links import Link
from shardwise.comm.setup import ordered_kernels_overlap
from shardwise.errors import PipelineError
from shardwise.pipeline.actions import WEIGHT_GRADIENT, Action, Op, Schedule
from shardwise.pipeline.idle import range_of
from shardwise.pipeline.messages import Form, Receiver, Sender, form_of
from shardwise.pipeline.split_backward import DeferredWeights
from shardwise.utils.logging import logger

_NOTHING = contextlib.nullcontext()


class StageWork(Protocol):
    """Computations of a rank's stages, as the engine makes them."""

    def inputs(self, micro_batch: int) -> Any:
        """Return the inputs of the first stage."""

    def forward(self, stage: int, micro_batch: int, value: Any) -> Any:
        """Return the outputs of a stage; of the last stage the loss in training, else what the caller collects."""

    def backward(
        self,
        key: tuple[int, int],
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        split: bool,
        last: bool,
    ) -> None:
        """Differentiate, for (stage, micro-batch) `key`.

        `gradients` None: of a loss. `split`: `weight_gradients` follows. `last`: the stage is reduced now.
        """

    def weight_gradients(self, key: tuple[int, int], weights: DeferredWeights, *, last: bool) -> None:
        """Compute the other gradients of parameters."""

    def unshard(self, stage: int) -> None:
        """Keep the parameters of a stage unsharded until `reshard`."""

    def reshard(self, stage: int) -> None:
        """Reshard the parameters of a stage."""

    def step(self) -> None:
        """Step with the gradients of the batch."""


@dataclass
class _Held:
    """Values of one micro-batch in one stage."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    """Leaves to which gradients come back, in the order of the message."""
    outputs: list[GradientEdge] = field(default_factory=list)
    """Of the outputs to which gradients come back: the tensors are freed once they are sent."""
    loss: torch.Tensor | None = None
    weights: DeferredWeights | None = None


@dataclass
class _Batch:
    """One run of a schedule. `last`: places in this rank's actions of backward passes that reduce gradients."""

    schedule: Schedule
    work: StageWork
    trains: bool
    split: bool
    last: Collection[int]
    results: dict[int, Any] = field(default_factory=dict)


class Runtime:
    """Executes schedules on one rank; see the module docstring.

    Args:
        whole: communicator of all ranks of the job.
        ranks: ranks in `whole` of this pipeline, by position.
        position: this rank's position.
        rank_of: position of each stage.
        where: name of a stage, for messages.
        link: makes the links.
    """

    def __init__(
        self,
        whole: Communicator,
        ranks: Sequence[int],
        position: int,
        rank_of: Sequence[int],
        where: Callable[[int], str],
        link: Callable[..., Link] = Link,
    ) -> None:
        self._position, self._rank_of, self._where = position, tuple(rank_of), where
        self._device = whole.device
        # If NCCL ran kernels one after the other, a receive would hold up the collectives that its sender needs first.
        ahead = not whole.waits_on_host and ordered_kernels_overlap()
        links: dict[tuple[int, int, str], Link] = {}
        senders: dict[Link, Sender] = {}
        receivers: dict[Link, Receiver] = {}
        self._senders: dict[tuple[int, str], Sender | Link] = {}
        self._receivers: dict[tuple[int, str], Receiver] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        for stage in range(len(rank_of) - 1):
            low, high = rank_of[stage], rank_of[stage + 1]
            for source, target, what in ((low, high, "activations"), (high, low, "gradients")):
                if source == target or position not in (source, target):
                    continue
                key = source, target, what
                if key not in links:
                    links[key] = link(whole, ranks[source], ranks[target], what)
                    links[key].connect()
                made, owner = links[key], stage if what == "activations" else stage + 1
                if position == source:
                    plain = what == "gradients"
                    self._senders[owner, what] = made if plain else senders.setdefault(made, Sender(made, self._device))
                else:
                    form_for = None if what == "activations" else self._forms.get
                    if made not in receivers:
                        receivers[made] = Receiver(made, self._device, form_for, ahead=ahead)
                    self._receivers[owner, what] = receivers[made]
        self._links = list(links.values())
        self._failure = ""
        self._held: dict[tuple[int, int], _Held] = {}
        self._values: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], list[torch.Tensor]] = {}

    def expect(self, forms: Mapping[int, Form]) -> None:
        """Set the forms of the outputs of stages, as after a batch."""
        for (stage, what), end in (*self._senders.items(), *self._receivers.items()):
            if what == "activations" and not isinstance(end, Link):
                end.forms[stage] = forms[stage]

    def check(self, call: str) -> None:
        """Raise PipelineError if an error has ended an earlier batch before all of its messages were exchanged."""
        if self._failure and self._links:
            raise PipelineError(
                f"{call}: an error has ended an earlier batch on this rank ({self._failure}), and other ranks wait for "
                "messages of that batch. End the job, and resume from a checkpoint"
            )

    def run(self, schedule: Schedule, work: StageWork, *, fixed: bool) -> dict[int, Any]:
        """Execute a schedule; return the outputs of the last stage by micro-batch, on the rank that has this stage.

        `fixed`: all micro-batches have the forms of the last one before.
        """
        self._begin(schedule, fixed)
        actions = schedule.actions[self._position]
        backward: dict[int, int] = {}
        last: set[int] = set()
        for place, action in enumerate(actions):
            if action.op in WEIGHT_GRADIENT:
                backward[action.stage] = place
            elif action.op is Op.REDUCE:
                last.add(backward[action.stage])
        split = any(a.op is Op.BACKWARD_WEIGHT for a in actions)
        batch = _Batch(schedule, work, bool(backward), split, last)
        for number, action in enumerate(actions):
            try:
                with range_of(action):
                    self._execute(action, batch, last=number in batch.last)
            except BaseException as error:
                if action.micro_batch < 0:
                    raise
                self._failure = (
                    f"{self._where(action.stage)}, {action.op.value} of micro-batch {action.micro_batch}: "
                    f"{type(error).__name__}: {error}"
                )
                logger.error(self._failure)
                raise
        self._flush()
        return batch.results

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

    def _execute(self, action: Action, batch: _Batch, *, last: bool) -> None:
        key, op = (action.stage, action.micro_batch), action.op
        if op is Op.FORWARD:
            self._forward(action, batch)
        elif op is Op.SEND_FORWARD:
            self._send_activations(action, trains=batch.trains)
        elif op is Op.RECV_FORWARD:
            source = action.stage - 1, action.micro_batch
            form, tensors = self._receivers[action.stage - 1, "activations"].take(source)
            self._values[key] = form.value(tensors)
            self._held.setdefault(key, _Held()).inputs = [t for t in tensors if t.requires_grad]
        elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            self._backward(action, batch.work, last=last, whole=op is Op.BACKWARD)
        elif op is Op.BACKWARD_WEIGHT:
            held = self._held.pop(key)
            assert held.weights is not None
            batch.work.weight_gradients(key, held.weights, last=last)
        elif op is Op.SEND_BACKWARD:
            link = self._senders[action.stage, "gradients"]
            assert isinstance(link, Link)
            link.send(self._gradients.pop(key), f"{key}")
        elif op is Op.RECV_BACKWARD:
            source = action.stage + 1, action.micro_batch
            self._gradients[source] = self._receivers[action.stage + 1, "gradients"].take(source)[1]
        elif op is Op.UNSHARD:
            batch.work.unshard(action.stage)
        elif op is Op.RESHARD:
            batch.work.reshard(action.stage)
        elif op is Op.STEP:
            self._flush()
            batch.work.step()

    def close(self) -> None:
        """Release all values and messages, also after a batch that an error has ended."""
        self._held, self._values, self._gradients = {}, {}, {}
        for receiver in set(self._receivers.values()):
            receiver.close()
        for link in self._links:
            link.close()

    def _begin(self, schedule: Schedule, fixed: bool) -> None:
        self._held, self._values, self._gradients = {}, {}, {}
        self._forms.clear()
        sends = {"activations": Op.SEND_FORWARD, "gradients": Op.SEND_BACKWARD}
        keys: dict[Receiver, list[tuple[int, int]]] = {}
        for what, op in sends.items():
            owners = {stage for stage, kind in self._receivers if kind == what}
            for source in {self._rank_of[stage] for stage in owners}:
                for action in schedule.actions[source]:
                    if action.op is op and action.stage in owners:
                        receiver = self._receivers[action.stage, what]
                        keys.setdefault(receiver, []).append((action.stage, action.micro_batch))
        for end in (*self._senders.values(), *self._receivers.values()):
            if not isinstance(end, Link):
                end.fixed = fixed
        for receiver, coming in keys.items():
            receiver.begin(coming)

    def _forward(self, action: Action, batch: _Batch) -> None:
        key = action.stage, action.micro_batch
        held = self._held.setdefault(key, _Held())
        value = batch.work.inputs(action.micro_batch) if action.stage == 0 else self._values.pop(key)
        around: contextlib.AbstractContextManager[None] = _NOTHING
        if batch.split:
            held.weights = DeferredWeights()
            around = held.weights.collecting()
        with around:
            output = batch.work.forward(action.stage, action.micro_batch, value)
        last = action.stage == len(self._rank_of) - 1
        if batch.trains and last:
            held.loss = output
        if not batch.trains:
            del self._held[key]
        if last:
            batch.results[action.micro_batch] = None if batch.trains else output
        else:
            self._values[key] = output
            if self._rank_of[action.stage + 1] == self._position:
                self._hand_on(action, trains=batch.trains)

    def _hand_on(self, action: Action, *, trains: bool) -> None:
        """Give the outputs of a stage to the next one, which is on this rank."""
        key, following = (action.stage, action.micro_batch), (action.stage + 1, action.micro_batch)
        form, tensors = form_of(self._values.pop(key), self._where(action.stage), grad=trains)
        leaves = [tensor.detach() for tensor in tensors]
        self._values[following] = form.value(leaves)
        if trains:
            kept = [t for t, (_, _, grad) in zip(tensors, form.tensors, strict=True) if grad]
            self._held[key].outputs = [get_gradient_edge(tensor) for tensor in kept]
            self._held.setdefault(following, _Held()).inputs = [leaf for leaf in leaves if leaf.requires_grad]

    def _send_activations(self, action: Action, *, trains: bool) -> None:
        key = action.stage, action.micro_batch
        sender = self._senders[action.stage, "activations"]
        assert isinstance(sender, Sender)
        outputs = sender.send(self._values.pop(key), self._where(action.stage), key, grad=trains)
        if not trains:
            return
        self._held[key].outputs = [get_gradient_edge(tensor) for tensor in outputs]
        facts = tuple((str(t.dtype).removeprefix("torch."), tuple(t.shape), False) for t in outputs)
        self._forms[action.stage + 1, action.micro_batch] = Form("", facts)
        self._receivers[action.stage + 1, "gradients"].look_ahead()

    def _backward(self, action: Action, work: StageWork, *, last: bool, whole: bool) -> None:
        key = action.stage, action.micro_batch
        held = self._held[key]
        split = held.weights is not None
        if held.loss is not None:
            work.backward(key, [held.loss], None, split=split, last=last and not split)
            held.loss = None
        else:
            gradients = self._gradients.pop((action.stage + 1, action.micro_batch))
            work.backward(key, held.outputs, gradients, split=split, last=last and not split)
        inputs, held.inputs, held.outputs = held.inputs, [], []
        if action.stage > 0:
            self._gradients[key] = [torch.zeros_like(i) if i.grad is None else i.grad for i in inputs]
        if whole:
            weights = self._held.pop(key).weights
            if weights is not None:
                work.weight_gradients(key, weights, last=last)
