"""A strategy's gradients: ``backward`` of this tower's share, and averages of what a script computes itself (R2).

[Note: nothing is computed on an empty share] A tower without examples opens a backward of its own in the averager that
touches no parameter, and takes part in the sum of the losses, whose dtype it learns from the other towers. Its
``loss_fn`` is called nevertheless where the forward itself makes collectives: BatchNorm over the global batch, and lazy
modules before their first batch. Collectives that a ``loss_fn`` makes itself cannot be seen beforehand; they end in a
DeadlockError that names them.

[Note: averages on request] ``torch.autograd.grad`` calls no hook of a parameter, so its results are each tower's own;
``strategy.grad`` and ``strategy.average_gradients`` average them in one announced call
(:mod:`towers.gradients.averages`). An average that carries a graph would need a collective in the backward through it,
which towers reach at different times; so ``create_graph`` is refused, and a penalty on gradients goes into the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mirrored.context import current_replica
from mirrored.interceptor import interceptor
from mirrored.losses import compute_average_loss
from mirrored.seeds import TowerStreams
from mirrored.strategy.calls import CheckedCalls
from towers.collectives.agreement import announce
from towers.collectives.values import sum_of_some
from towers.health.status import with_batch
from towers.system.memory_layout import is_dense


class Gradients(CheckedCalls):
    """The methods of a strategy that compute or average gradients; see :class:`mirrored.Strategy`."""

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
                model's forward itself makes collectives: BatchNorm over the global batch that trains, and
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
        if (replica := current_replica()) is None:
            raise RuntimeError("strategy.backward is for the function that strategy.run(...) calls")
        if (virtual := self.engine.virtual) is not None:
            if self.accumulates:
                raise RuntimeError(
                    "strategy.backward() with virtual towers adds up the gradients of all towers, and cannot do so "
                    "inside no_sync(); call it outside (a larger virtual_towers saves as much memory as accumulating "
                    "does)"
                )
            return virtual.backward(loss_fn, batch, sample_weight, denominator, replica, self.streams.seed)
        loss: Tensor | None = None
        # see [Note: nothing is computed on an empty share]
        if self.known_shares.is_empty(batch) and not self.engine.communicates_in_forward:
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

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Iterable[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of ``torch.autograd.grad``, averaged over the towers; ``p.grad`` stays as it is.

        It does what ``tape.gradient`` and an all-reduce do in TensorFlow. All towers call it, inside ``run`` or
        outside. At one tower it is ``torch.autograd.grad``.

        Args:
            outputs: this tower's loss, such as ``compute_average_loss`` returns it, or several outputs.
            inputs: parameters, or other tensors that are equal on all towers; with the same shapes and dtypes in the
                same order on all of them.
            grad_outputs, retain_graph, materialize_grads: see ``torch.autograd.grad``.
            create_graph: has to be False, since an average over the towers carries no graph.
            allow_unused: None is returned for an input that no tower has used; where some have used it, the others
                contribute zero. If False, an unused input is an error.

        Returns:
            One gradient for each input, of its shape and dtype; sparse where no tower's gradient is dense.

        Raises:
            ValueError: with ``create_graph``; for an input that is this tower's share of a batch; or, on all of several
                towers, when ``torch.autograd.grad`` fails on one of them.
            RuntimeError: inside ``no_sync``; or, at one tower, when ``torch.autograd.grad`` fails.
            DisagreementError: on all towers, when some call something else, or give other inputs.
        """
        self._check_here("grad()")
        if create_graph:
            raise ValueError(
                "strategy.grad(create_graph=True): an average over the towers carries no graph, so a penalty on it "
                "would be a constant. Take torch.autograd.grad(loss, inputs, create_graph=True) of this tower's loss, "
                "add the penalty to the loss, and give the sum to backward() or strategy.grad"
            )
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        take = functools.partial(
            torch.autograd.grad,
            outputs,
            wanted,
            grad_outputs,
            retain_graph=retain_graph,
            allow_unused=allow_unused or materialize_grads,
            materialize_grads=materialize_grads,
        )
        if not self._several:
            return take()
        call = f"strategy.grad() of {len(wanted)} inputs"
        self._refuse_own(call, wanted)
        try:
            gradients = take()
        except Exception as error:
            announce(self.communicator, call, error=error)  # an error on all towers
            raise
        means = self._averaged(call, wanted, gradients)
        self.engine.averager.note_averaged(wanted, replaced=False)
        return tuple(means)

    def average_gradients(self, parameters: Tensor | Iterable[Tensor]) -> None:
        """Average what lies in ``p.grad`` now, for a script that has put it there itself; all towers call it.

        What ``backward()`` leaves is averaged already; to average it again changes nothing. What it leaves inside
        ``no_sync`` is each tower's own, and can be averaged so after it.

        Args:
            parameters: the same ones in the same order on all towers. One without a gradient on any tower keeps none;
                where some have a gradient, the others contribute zero.

        Raises:
            ValueError: on all towers, when a gradient carries a graph on one of them.
            RuntimeError: inside ``no_sync``.
            DisagreementError: on all towers, when some call something else, or give other parameters.
        """
        self._check_here("average_gradients()")
        chosen = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
        if not self._several:
            return
        call = f"strategy.average_gradients() of {len(chosen)} parameters"
        gradients = [parameter.grad for parameter in chosen]
        if any(gradient is not None and gradient.requires_grad for gradient in gradients):
            problem = ValueError("a gradient carries a graph (create_graph=True), and an average cannot; detach it")
            announce(self.communicator, call, error=problem)
        for parameter, before, mean in zip(chosen, gradients, self._averaged(call, chosen, gradients), strict=True):
            if before is None or mean is None or before.is_sparse or mean.is_sparse or not is_dense(before):
                parameter.grad = mean
            else:
                before.detach().copy_(mean)
        self.engine.averager.note_averaged(chosen, replaced=True)

    def synchronize(self) -> None:
        """Average the parameters now, before it is time; all towers call it. The local steps are counted from here.

        For strategies with ``synchronize=``, whose towers hold different parameters between synchronisations: before an
        evaluation, and at the end. Of others parameters are always the same, and there is nothing to do.

        Raises:
            RuntimeError: inside ``run``.
            DisagreementError: on all towers, when some call something else.
            MirrorError: on all towers, when they are not the same after it.
        """
        self._check_here("synchronize()")
        if current_replica() is not None:
            raise RuntimeError("strategy.synchronize() was called inside strategy.run(...): call it outside of it")
        if self.engine.local is not None:
            self.engine.local.synchronize()

    def _averaged(
        self, call: str, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The means of gradients over several towers; all that a script averages by itself goes through here.

        With local steps each tower keeps its own.

        Args:
            tensors: what the gradients belong to.
        """
        if self.engine.local is not None:
            return list(gradients)
        if self.accumulates:
            raise RuntimeError(
                f"{call} averages over the towers, but in no_sync() gradients are each tower's own: call it outside, "
                "or torch.autograd.grad inside"
            )
        health = self.communicator.health
        health.train()
        call = with_batch(call, health.batches.value)
        from towers.gradients.averages import average

        return average(self.communicator, call, tensors, gradients, self.engine.recorder.name_of)

    def _refuse_own(self, call: str, tensors: Sequence[Tensor]) -> None:
        """Check that no tensor is this tower's share of a batch."""
        for i, tensor in enumerate(tensors):
            if self.known_shares.get(tensor) is not None:
                raise ValueError(
                    f"{call}: input {i}, of shape {tuple(tensor.shape)}, is this tower's share of a batch. The "
                    "gradient with respect to it belongs to this tower's examples; compute it with "
                    "torch.autograd.grad"
                )
