"""Gradients that a script computes or changes itself, without ``backward()``, averaged by the same rule (R2).

[Note: averages on request] ``torch.autograd.grad`` calls no hook of a parameter, so its results are each tower's own;
``strategy.grad`` and ``strategy.average_gradients`` average them in one announced call
(:mod:`towers.gradients.averages`). An average that carries a graph would need a collective in the backward through it,
which towers reach at different times; so ``create_graph`` is refused, and a penalty on gradients goes into the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mirrored.strategy.calls import CheckedCalls
from towers.collectives.agreement import announce
from towers.health.status import with_batch
from towers.system.memory_layout import is_dense


class OwnGradients(CheckedCalls):
    """The part of a strategy for gradients that are no business of ``backward()``; and its barrier."""

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
            grad_outputs, retain_graph, materialize_grads: as of ``torch.autograd.grad``.
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

    def _averaged(
        self, call: str, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The means of gradients over several towers; all that a script averages by itself goes through here.

        Args:
            tensors: what the gradients belong to.
        """
        if self.accumulates:
            raise RuntimeError(
                f"{call} averages over the towers, but in no_sync() gradients are each tower's own: call it outside, "
                "or torch.autograd.grad inside"
            )
        health = self.communicator.health
        health.train()
        call = with_batch(call, health.batch)
        from towers.gradients.averages import average

        return average(self.communicator, call, tensors, gradients, self.engine.recorder.name_of)

    def _refuse_own(self, call: str, tensors: Sequence[Tensor]) -> None:
        """See that no tensor is this tower's share of a batch."""
        for i, tensor in enumerate(tensors):
            if self.known_shares.get(tensor) is not None:
                raise ValueError(
                    f"{call}: input {i}, of shape {tuple(tensor.shape)}, is this tower's share of a batch, whose "
                    "gradient belongs to its own examples; take it by torch.autograd.grad"
                )

    def barrier(self) -> None:
        """Return when all towers have called it. On GPUs the hosts wait for each other, not for the GPUs.

        Raises:
            DisagreementError: on all towers, when some call something else.
        """
        self._check_here("barrier()")
        if self._several:
            announce(self.communicator, "strategy.barrier()")
