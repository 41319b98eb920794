"""A strategy's gradients: ``backward`` of this tower's share, and averages of gradients that a script computes (R2).

[Note: nothing is computed on an empty share] A tower without examples starts a backward in the averager that touches no
parameter, and takes part in the sum of the losses, whose dtype it receives from the other towers. Its ``loss_fn`` is
called only if the forward itself runs collectives: BatchNorm over the global batch, and lazy modules before their first
batch. Collectives in ``loss_fn`` itself cannot be known beforehand; they end in a DeadlockError that names them.

[Note: averages on request] ``torch.autograd.grad`` calls no hook of a parameter, so its results differ between towers.
``strategy.grad`` and ``strategy.average_gradients`` average them in one announced call
(:mod:`towers.gradients.reductions`). An average with a graph would need a collective in the backward through it, which
towers reach at different times. Therefore ``create_graph`` is refused, and a penalty on gradients belongs in the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mirrored.context import current_replica, refuse_in_library, refuse_inside_run
from mirrored.interceptor import interceptor
from mirrored.losses import compute_average_loss
from mirrored.seeds import TowerStreams
from mirrored.strategy.calls import CheckedCalls
from towers.collectives.agreement import announce
from towers.collectives.values import sum_of_some
from towers.health.status import with_batch
from towers.system.tensors import is_dense


class Gradients(CheckedCalls):
    """Methods of :class:`mirrored.Strategy` that compute or average gradients."""

    streams: TowerStreams

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        *batch: Any,
        sample_weight: Tensor | float | None = None,
        denominator: Literal["examples", "weights"] = "examples",
    ) -> Tensor:
        """Runs forward, loss and backward of this tower's share. Call it inside :meth:`run`.

        With ``virtual_towers``, the share is computed one virtual tower at a time (:mod:`mirrored.virtual.towers`), and
        the result has the same bits on any number of towers. This is also exact gradient accumulation: it needs the
        memory of one virtual tower's examples. Without ``virtual_towers``, the call equals
        ``compute_average_loss(loss_fn(*batch)).backward()`` if the share has examples. Otherwise this tower takes part
        in the average and contributes zero.

        Args:
            loss_fn: receives a virtual tower's part of ``batch``, and returns one loss per example, of shape
                ``(examples, …)``. Its draws from the random generators of Python, NumPy and torch depend only on (seed,
                step, virtual tower). It is not called for a part or share without examples, unless the model's forward
                itself runs collectives (BatchNorm over the global batch in training, and lazy modules in their first
                forward). Therefore it must not run collectives such as ``strategy.reduce`` if a share may be empty;
                with ``stand_in=True``, no share is empty.
            batch: nested tensors, arrays and lists with an entry for each example of the share, which are split.
                Numbers and other objects are passed unchanged. The result of a ``collate_fn`` is collated again for
                each virtual tower, so pass the batch's own tensors and dicts, and change them in ``loss_fn``. Numbers
                that the ``collate_fn`` computed are recognised only in its dicts and tuples. Values that do not belong
                to examples, and tensors with a graph, must be created in ``loss_fn`` or taken from outside.
            sample_weight: multiplies the losses; a number, or a tensor of shape ``(examples,)`` or of the losses'
                shape.
            denominator: "weights" divides by the sum of ``sample_weight`` over all towers instead of the number of
                examples. The weights must then have the losses' shape.

        Returns:
            The mean loss over the global batch: a detached scalar, equal on all towers, of the losses' dtype (torch's
            default dtype if no tower has examples). Its gradient has been added to ``p.grad``.

        Raises:
            RuntimeError: outside ``run``; with virtual towers, inside ``no_sync``.
            ValueError: ``loss_fn`` does not return one loss per example, there is no batch, a part of it cannot be
                split, or the weights do not fit.
            TypeError: the number of examples in ``batch`` is unknown.
            MirrorError: virtual towers changed an integer buffer differently (on GPUs raised by a later call).
        """
        self._check_here("backward()")
        refuse_in_library("strategy.backward()")
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
        """Returns the gradients of ``torch.autograd.grad``, averaged over the towers. ``p.grad`` does not change.

        It corresponds to ``tape.gradient`` and an all-reduce in TensorFlow. All towers must call it, inside ``run`` or
        outside. On one tower it is ``torch.autograd.grad``.

        Args:
            outputs: this tower's loss, such as the result of ``compute_average_loss``, or several outputs.
            inputs: parameters, or other tensors that are equal on all towers, with the same shapes and dtypes in the
                same order on all towers.
            grad_outputs, retain_graph, materialize_grads: see ``torch.autograd.grad``.
            create_graph: must be False, because an average over the towers has no graph.
            allow_unused: whether unused inputs are allowed. The gradient of an input that no tower has used is None. If
                some towers have used it, the others contribute zero. If False, an unused input is an error.

        Returns:
            One gradient for each input, of its shape and dtype; sparse unless some tower's gradient is dense.

        Raises:
            ValueError: with ``create_graph``; for sharded parameters, or an input that is this tower's share of a
                batch; or, on all of several towers, if ``torch.autograd.grad`` fails on one of them.
            RuntimeError: inside ``no_sync``; or, on one tower, if ``torch.autograd.grad`` fails.
            DisagreementError: on all towers, if some make another call or pass other inputs.
        """
        self._check_here("grad()")
        refuse_in_library("strategy.grad()")
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
        self._refuse_sharded("strategy.grad()", wanted)
        try:
            gradients = take()
        except Exception as error:
            announce(self.communicator, call, error=error)  # an error on all towers
            raise
        means = self._averaged(call, wanted, gradients)
        self.engine.averager.note_averaged(wanted, replaced=False)
        return tuple(means)

    def _refuse_sharded(self, call: str, tensors: Iterable[Tensor]) -> None:
        if any(map(self.engine.recorder.is_sharded, tensors)):
            raise ValueError(f"{call} of sharded parameters: only loss.backward() computes their gradients")

    def average_gradients(self, parameters: Tensor | Iterable[Tensor]) -> None:
        """Averages the gradients that a script has assigned to ``p.grad``. All towers must call it.

        Gradients of ``backward()`` are averaged already; averaging them again changes nothing. Gradients of a backward
        inside ``no_sync`` differ between towers, and this call can average them afterwards.

        Args:
            parameters: the same parameters in the same order on all towers. A parameter without a gradient on any tower
                keeps None. If some towers have a gradient, the others contribute zero.

        Raises:
            ValueError: for sharded parameters; or, on all towers, if a gradient of one of them has a graph.
            RuntimeError: inside ``no_sync``.
            DisagreementError: on all towers, if some make another call or pass other parameters.
        """
        self._check_here("average_gradients()")
        refuse_in_library("strategy.average_gradients()")
        chosen = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
        if not self._several:
            return
        call = f"strategy.average_gradients() of {len(chosen)} parameters"
        self._refuse_sharded("strategy.average_gradients()", chosen)
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
        """Averages the parameters now, and restarts the count of local steps. All towers must call it.

        Call it before an evaluation and at the end, if the strategy has ``synchronize=``: its towers' parameters differ
        between synchronisations. For other strategies it does nothing.

        Raises:
            RuntimeError: inside ``run``.
            DisagreementError: on all towers, if some make another call.
            MirrorError: on all towers, if the parameters differ afterwards.
        """
        self._check_here("synchronize()")
        refuse_inside_run("strategy.synchronize()")
        if self.engine.local is not None:
            self.engine.local.synchronize()

    def _averaged(
        self, call: str, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the means of gradients over several towers, for gradients that a script averages itself.

        With local steps, each tower keeps its own gradients.

        Args:
            tensors: the tensors of these gradients.
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
        call = with_batch(call, health.place.batch)
        from towers.gradients.reductions import average

        return average(self.communicator, call, tensors, gradients, self.engine.recorder.name_of)

    def _refuse_own(self, call: str, tensors: Sequence[Tensor]) -> None:
        """Checks that no tensor is this tower's share of a batch."""
        for i, tensor in enumerate(tensors):
            if self.known_shares.get(tensor) is not None:
                raise ValueError(
                    f"{call}: input {i}, of shape {tuple(tensor.shape)}, is this tower's share of a batch. The "
                    "gradient with respect to it belongs to this tower's examples; compute it with "
                    "torch.autograd.grad"
                )
