"""Messages between stages: nested values of tensors, and what a receiver has to know before they arrive.

A value may be nested containers of tensors, None, numbers, booleans and strings. Its `Form` has the structure, and of
each tensor shape, dtype and whether a gradient comes back. A receiver of activations gets the form first, for which its
host waits, unless all micro-batches are known to have the form of the message before. A receiver of gradients knows the
form: gradients have the shapes of the outputs that it has sent.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from shardwise.comm.communicator import Handle
from shardwise.comm.links import Link
from shardwise.errors import UsageError

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Form:
    """Structure of a value, as text; `tensors`: (dtype, shape, requires a gradient) of each tensor, in order."""

    text: str
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors without values."""
        return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape, _ in self.tensors]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with these tensors, of which those that get gradients become leaves of a graph.

        The value has results of the leaves, because leaves cannot be changed in place.
        """
        structure, leaves = json.loads(self.text)
        wanted = [tensor.requires_grad_(grad) for tensor, (_, _, grad) in zip(tensors, self.tensors, strict=True)]
        given = [_Received.apply(tensor) if tensor.requires_grad else tensor for tensor in wanted]
        filled = [given[leaf] if kind == "tensor" else leaf for kind, leaf in leaves]
        return tree_unflatten(filled, treespec_loads(structure))

    def encoded(self) -> bytes:
        """Return the form as bytes."""
        return json.dumps([self.text, self.tensors]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Form:
        """Return the form from bytes."""
        text, tensors = json.loads(data)
        return cls(text, tuple((dtype, tuple(shape), grad) for dtype, shape, grad in tensors))


class _Received(torch.autograd.Function):
    """Identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def form_of(value: Any, where: str, *, grad: bool = True) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of a value and its tensors, each once. `grad`: gradients come back, where tensors require them.

    Raises UsageError, with the source `where`, if the value has an object that cannot be sent.
    """
    leaves, structure = tree_flatten(value)
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}
    written: list[tuple[str, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            place = places.setdefault(id(leaf), len(tensors))
            tensors += [leaf] if place == len(tensors) else []
            written.append(("tensor", place))
        elif isinstance(leaf, _PLAIN):
            written.append(("plain", leaf))
        else:
            raise UsageError(
                f"{where} has returned a value of type {type(leaf).__name__}. Between pipeline stages only tensors, "
                "None, numbers, booleans and strings can be sent, in tuples, lists and dictionaries"
            )
    facts = tuple(
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), grad and tensor.requires_grad)
        for tensor in tensors
    )
    return Form(json.dumps([treespec_dumps(structure), written]), facts), tensors


class Sender:
    """Sends activations over a link.

    Attributes:
        forms: form of the last message, by the stage that has computed the value.
        fixed: set for a batch: every message has the form of the stage's message before.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link, self._device = link, device
        self.forms: dict[int, Form] = {}
        self.fixed = False

    def send(self, value: Any, where: str, key: tuple[int, int], *, grad: bool) -> list[torch.Tensor]:
        """Send a value; return its tensors to which gradients come back. `key`: stage and micro-batch."""
        form, tensors = form_of(value, where, grad=grad)
        last, label = self.forms.get(key[0]), f"{key}"
        if self.fixed:
            if form != last:
                raise UsageError(
                    f"{where} has returned {_shown(form)}, and {_shown(last)} for inputs of the same shapes. Set "
                    "`pipeline.dynamic_shape`, so that shapes are sent with each micro-batch"
                )
        elif form == last:
            self._link.send([torch.zeros(1, dtype=torch.int64, device=self._device)], label)
        else:
            data = torch.frombuffer(bytearray(form.encoded()), dtype=torch.uint8).to(self._device)
            self._link.send([torch.full((1,), len(data), dtype=torch.int64, device=self._device), data], label)
        self.forms[key[0]] = form
        self._link.send([tensor.detach().contiguous() for tensor in tensors], label)
        return [tensor for tensor, (_, _, wanted) in zip(tensors, form.tensors, strict=True) if wanted]

    def flush(self) -> None:
        """Wait until the peer has all messages."""
        self._link.flush()


class Receiver:
    """Receives activations or gradients in the order in which the peer sends them.

    `begin` gives the keys (stage and micro-batch) of the coming messages; `take` waits for the message of a key, and
    keeps those that come before it. `forms` are those of a `Sender`. `ahead`: the receiving of the next message is
    launched before it is needed. Not on Gloo, where a process group cannot be destroyed during a receive: after an
    error here, peers would wait for the limit of a collective.
    """

    def __init__(
        self,
        link: Link,
        device: torch.device,
        form_for: Callable[[tuple[int, int]], Form | None] | None = None,
        *,
        ahead: bool,
    ) -> None:
        self._link, self._device, self._ahead = link, device, ahead
        self._form_for = form_for
        self.forms: dict[int, Form] = {}
        self._coming: deque[tuple[int, int]] = deque()
        self._posted: tuple[tuple[int, int], Form, list[torch.Tensor], list[Handle]] | None = None
        self._here: dict[tuple[int, int], tuple[Form, list[torch.Tensor]]] = {}
        self.fixed = False

    def begin(self, keys: Sequence[tuple[int, int]]) -> None:
        """Expect the messages of a batch, in the peer's order."""
        self._coming = deque(keys)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Launch the receiving of the next message, if its form is known."""
        if self._ahead and self._posted is None and self._coming and (form := self._known_form()) is not None:
            self._post(form)

    def _known_form(self) -> Form | None:
        if self._form_for is not None:
            return self._form_for(self._coming[0])
        return self.forms.get(self._coming[0][0]) if self.fixed else None

    def _post(self, form: Form) -> None:
        key = self._coming.popleft()
        tensors = form.allocate(self._device)
        self._posted = key, form, tensors, self._link.receive(tensors, f"{key}")

    def take(self, key: tuple[int, int]) -> tuple[Form, list[torch.Tensor]]:
        """Wait for the message of a key; return its form and tensors."""
        while key not in self._here:
            if self._posted is None:
                form = self._known_form()
                self._post(self._receive_form() if form is None else form)
            assert self._posted is not None
            came, form, tensors, handles = self._posted
            self._posted = None
            for handle in handles:
                handle.wait()
            self._here[came] = form, tensors
            self.look_ahead()
        return self._here.pop(key)

    def _receive_form(self) -> Form:
        stage, label = self._coming[0][0], f"{self._coming[0]}"
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._link.receive([length], label)[0].wait()
        size = int(length.item())
        if size:
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._link.receive([data], label)[0].wait()
            self.forms[stage] = Form.decoded(bytes(data.cpu().tolist()))
        return self.forms[stage]

    def close(self) -> None:
        """Release messages under way, and those that have not been taken."""
        self._posted, self._here = None, {}


def _shown(form: Form | None) -> str:
    tensors = () if form is None else form.tensors
    return ", ".join(f"{kind}{list(shape)}{' with gradient' * grad}" for kind, shape, grad in tensors) or "nothing"
