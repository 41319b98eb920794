"""Averages gradients that a script has computed itself, all at once.

[Note: a script's own gradients] ``torch.autograd.grad`` runs no hooks of parameters, so its results are each tower's
own. They are averaged on request, in one announced call. A digest compares shapes and dtypes. One digit per gradient
shows whether this tower has one, and another digit whether it is dense. An average with a graph would need a collective
in the backward through it, which towers reach at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from towers.collectives.agreement import announce, digest_of
from towers.collectives.communicator import Communicator, InStep
from towers.collectives.values import together
from towers.errors import DisagreementError
from towers.gradients.sparse import average_rows, has_rows, to_dense, without_rows
from towers.system.memory_layout import gradient_dtype


@torch.no_grad()
def average(
    comm: Communicator,
    call: str,
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    name_of: Callable[[Tensor], str],
) -> list[Tensor | None]:
    """Returns the mean over the towers of every gradient. All towers call it.

    Args:
        call: the call's name in messages; the same on all towers.
        tensors: the tensors of the gradients, with the same shapes and dtypes in the same order on all towers.
        gradients: dense or sparse. None counts as zero if another tower has a gradient.
        name_of: returns a tensor's name in messages.

    Returns:
        New tensors, which are sparse if no tower's gradient is dense; None if no tower has a gradient.

    Raises:
        DisagreementError: on all towers, if some make another call or give other tensors.
    """
    kinds = [[str(gradient_dtype(tensor)), list(tensor.shape)] for tensor in tensors]
    digest = digest_of(kinds)
    local = [
        digest,
        _mask([g is not None for g in gradients]),
        _mask([g is not None and not has_rows(g) for g in gradients]),
    ]
    towers = announce(comm, call, local)
    if any(other != digest for other, _, _ in towers):
        raise _difference(comm, call, [[name_of(t), *kind] for t, kind in zip(tensors, kinds, strict=True)])
    means: list[Tensor | None] = [None] * len(tensors)
    dense: dict[int, Tensor] = {}
    with InStep(comm):
        for i, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
            if all(present[i] == "0" for _, present, _ in towers):
                continue
            if any(is_dense[i] == "1" for _, _, is_dense in towers):
                dense[i] = _densely(tensor, gradient)
            else:
                nothing = without_rows(tensor.shape, gradient_dtype(tensor), tensor.device)
                means[i] = average_rows(comm, nothing if gradient is None else gradient)
        for i, mean in zip(dense, together(list(dense.values()), partial(average_flat, comm)), strict=True):
            means[i] = mean
    return means


def _mask(flags: Sequence[bool]) -> str:
    return "".join("1" if flag else "0" for flag in flags)


def _densely(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(tensor.shape, dtype=gradient_dtype(tensor), device=tensor.device)
    return to_dense(gradient) if gradient.is_sparse else gradient


def average_flat(comm: Communicator, flat: Tensor) -> None:
    """Averages a flat tensor over the towers, in place."""
    real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    comm.submit_average(real.mul_(comm.prescale)).wait()


def _difference(comm: Communicator, call: str, described: Sequence[Sequence[object]]) -> DisagreementError:
    """Returns the error of towers that give different tensors, with one message on all of them. All towers call it."""
    towers = comm.all_gather_json(described)
    advice = "every tower must give the same tensors in the same order"
    for tower, other in enumerate(towers):
        if len(other) != len(towers[0]):
            return DisagreementError(
                f"{call}: {len(towers[0])} gradients on tower 0, but {len(other)} on tower {tower}; {advice}"
            )
        for (name, dtype, shape), (_, other_dtype, other_shape) in zip(towers[0], other, strict=True):
            if [dtype, shape] != [other_dtype, other_shape]:
                return DisagreementError(
                    f"{call}: the gradient of {name} is {dtype} of shape {tuple(shape)} on tower 0, but {other_dtype} "
                    f"of shape {tuple(other_shape)} on tower {tower}; {advice}"
                )
    return DisagreementError(f"{call}: the towers gave different tensors; {advice}")
