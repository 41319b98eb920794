"""``strategy.backward``: forward, loss and backward of this tower's share, whole or virtual tower by virtual tower.

[Note: nothing is computed on an empty share] A tower without examples opens a backward of its own in the averager that
touches no parameter, and takes part in the sum of the losses, whose dtype the other towers say. Its ``loss_fn`` is
called nevertheless where a forward is a matter of all towers: BatchNorm over the global batch, and lazy modules before
their first batch. Collectives that a ``loss_fn`` makes itself cannot be seen beforehand; they end in a DeadlockError
that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mirrored.context import current_frame
from mirrored.data.sizes import is_empty
from mirrored.interceptor import interceptor
from mirrored.losses import compute_average_loss
from mirrored.seeds import TowerStreams
from mirrored.strategy.calls import CheckedCalls
from towers.collectives.values import sum_of_some


class Backward(CheckedCalls):
    """The part of a strategy for ``backward``, and the state that its random numbers depend on."""

    streams: TowerStreams

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        *batch: Any,
        sample_weight: Tensor | float | None = None,
        denominator: Literal["examples", "weights"] = "examples",
    ) -> Tensor:
        """Forward, loss and backward of this tower's share; to be called inside :meth:`run`.

        With ``virtual_towers`` the share is computed virtual tower by virtual tower (:mod:`mirrored.virtual.towers`),
        and the result has the same bits on any number of towers. It is exact gradient accumulation, too: the memory of
        one virtual tower's examples at a time. Without, it is what ``compute_average_loss(loss_fn(*batch)).backward()``
        does where the share has examples; elsewhere this tower takes part in the average and contributes nothing.

        Args:
            loss_fn: called with a virtual tower's part of ``batch``; returns one loss per example, of shape
                ``(examples, …)``. What it draws from the random generators of Python, NumPy and torch depends on
                (seed, step, virtual tower) only. It is not called for parts, or a share, without examples, unless the
                model's forward is a matter of all towers together: BatchNorm over the global batch that trains, and
                lazy modules in their first forward. So it makes no collectives of its own, such as
                ``strategy.reduce``, where a share may be empty (``stand_in=True`` lets none be).
            batch: nested tensors, arrays and lists with an entry for each example of the share, which are cut; numbers
                and other objects are passed as they are. What a ``collate_fn`` made is collated anew for each virtual
                tower, so give the batch's own tensors and dicts, and change them in ``loss_fn``; numbers that it made
                are found in its dicts and tuples only. What does not belong to examples, and what carries a graph,
                ``loss_fn`` makes or takes from outside.
            sample_weight: multiplies the losses; a number, or a tensor of shape ``(examples,)`` or the losses'.
            denominator: "weights" divides by the sum of ``sample_weight`` over all towers instead of the number of
                examples; weights must have the losses' shape then.

        Returns:
            The mean loss over the global batch, a detached scalar, equal on all towers, of the losses' dtype (the
            default one where no tower has examples). After it, ``p.grad`` is its gradient, added to what was there
            before.

        Raises:
            RuntimeError: outside ``run``; with virtual towers, inside ``no_sync``.
            ValueError: ``loss_fn`` does not return one loss per example, there is no batch, something in it cannot be
                cut, or weights do not fit.
            TypeError: the number of examples in ``batch`` cannot be told.
            MirrorError: virtual towers made different things of an integer buffer (on GPUs by a later call).
        """
        self._check_here("backward()")
        current = current_frame()
        if current is None or current.replica is None:
            raise RuntimeError("strategy.backward is for the function that strategy.run(...) calls")
        virtual = self.engine.virtual
        if virtual is None:
            return self._backward_of_share(loss_fn, batch, sample_weight, denominator)
        if self.accumulates:
            raise RuntimeError(
                "strategy.backward() with virtual towers adds up the gradients of all towers, and cannot do so inside "
                "no_sync(); call it outside (a larger virtual_towers saves as much memory as accumulating does)"
            )
        return virtual.backward(loss_fn, batch, sample_weight, denominator, current.replica, self.streams.seed)

    def _backward_of_share(
        self,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        sample_weight: Tensor | float | None,
        denominator: Literal["examples", "weights"],
    ) -> Tensor:
        """:meth:`backward` without virtual towers: forward and backward of this tower's share as a whole."""
        loss: Tensor | None = None
        # see [Note: nothing is computed on an empty share]
        if is_empty(self.known_shares, batch) and not self.engine.exchanges_in_forward:
            # The others count the examples, or add up their weights, together with this tower.
            nothing = torch.zeros(0, *getattr(sample_weight, "shape", ())[1:], device=self.communicator.device)
            compute_average_loss(nothing, sample_weight, denominator=denominator)
            self.engine.averager.contribute_nothing()
        else:
            loss = compute_average_loss(loss_fn(*batch), sample_weight, denominator=denominator)
            loss.backward()
        mean = sum_of_some(self.communicator, "strategy.backward()", loss)
        interceptor().returned("strategy.reduce('sum')", mean)
        return mean

    def state_dict(self) -> dict[str, int]:
        """The seed and the number of backwards so far, which decide what the next :meth:`backward` draws."""
        backwards = self.engine.virtual.step if self.engine.virtual is not None else 0
        return {"seed": self.streams.seed, "backwards": backwards}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where :meth:`state_dict` was taken, on any number of towers. All towers load the same.

        Raises:
            ValueError: it is no such state.
        """
        for key in ("seed", "backwards"):
            number = state.get(key)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"state of a strategy: {key} is {number!r}, but must be a whole number from 0")
        self.streams.seed = state["seed"]
        if self.engine.virtual is not None:
            self.engine.virtual.step = state["backwards"]
