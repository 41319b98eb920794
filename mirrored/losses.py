"""Losses that are shares of the global mean (rule R3, docs/concepts/towers.md).

Each tower computes on its share of the global batch, and gradients are averaged over towers. The result is the
gradient of the mean over the *global* batch, for shares of any sizes, if a tower's loss is

    value:     sum(own examples) / G                         the values add up to the global mean
    gradient:  that of  towers · sum(own examples) / G       the average is the gradient of the global mean

with G the number of examples of the step over all towers. An empty share contributes an exact zero.

[Note: a loss must fit its batch] A loss whose number of entries differs from the number of examples of this tower's
share is an error that contains the fix. Dividing by "entries × towers" would give a mean of means, which is a different
number: entries per example (flattened tokens) differ between towers if each pads its own share. Without a distributed
batch, the towers add up their numbers of examples, in one small message per loss.

[Note: a compiled loss is bound when it runs] The number of examples of a step belongs to its batch, through weak
references that ``torch.compile`` cannot follow. It can change while this tower's share does not, so no graph may store
the number. A compiled function therefore calls a custom operator whose result is a tensor. The gradient's factor is an
autograd function with a forward derivative, which tracers refuse. Compiled, it consists of operations that preserve
infinities and NaN (``x - x.detach()`` would turn infinity into NaN).
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from mirrored.context import ReplicaContext, require_replica_context
from mirrored.uses_of_losses import check_use
from towers.collectives.agreement import announce
from towers.mirroring import fingerprints
from towers.system import tree as trees
from towers.system.tensors import on_device


def compute_average_loss(
    per_example_loss: Tensor,
    sample_weight: Tensor | float | None = None,
    global_batch_size: int | None = None,
    *,
    denominator: Literal["examples", "weights"] = "examples",
    batch: Any = None,
) -> Tensor:
    """Returns this tower's share of the mean loss over the global batch.

    Args:
        per_example_loss: losses with ``reduction="none"``; shape ``(examples, …)``, floating point. Further
            dimensions are summed, as in TensorFlow.
        sample_weight: multiplies the losses; a number, or a tensor whose shape is a prefix of
            ``per_example_loss``'s shape, such as ``(examples,)``.
        global_batch_size: the number of examples to divide by. Default: the true number of examples of this step over
            all towers. It is that of the batch of ``distribute_dataset`` that ``run`` received, or of the newest batch
            whose loop is running. Without such a batch, one small collective adds up the towers' numbers.
        denominator: "weights" divides by the sum of ``sample_weight`` over all towers instead (token losses
            with padding). It costs one small collective.
        batch: a tensor (or other object) of the distributed batch of these losses, or ``()`` if they belong to none.
            It is necessary if a step has several batches of equal size, or if batches may be stand-ins and the losses
            have another number of entries.

    Returns:
        A scalar. The values of all towers add up to the global mean (``strategy.reduce("sum", loss)``). After
        averaging, the gradients are those of the global mean. For an empty share or a stand-in
        (``distribute_dataset(…, stand_in=True)``), it is an exact zero with gradients of zeros. It may be added to
        other losses and multiplied by constants. A learnable weight, or another function, must be applied to the
        losses (rule R3). If it is applied to the result, backward raises RuntimeError on several towers in runs number
        1, 2, 4, 8, … of ``strategy.run``, except in a compiled function.

    Raises:
        RuntimeError: called outside ``strategy.run`` although a strategy with several towers exists.
        ValueError: a scalar loss; weights that do not fit; or a first dimension that is not a number of examples of
            this step.
    """
    replica = require_replica_context("compute_average_loss")
    if per_example_loss.dim() == 0:
        raise ValueError(
            "compute_average_loss needs one loss per example, but got a scalar: compute the loss with reduction='none'"
        )
    if denominator not in ("examples", "weights"):
        raise ValueError(f"denominator is {denominator!r}, but must be 'examples' or 'weights'")
    by_weights = denominator == "weights"
    if by_weights and (sample_weight is None or global_batch_size is not None):
        raise ValueError("denominator='weights' needs sample_weight and no global_batch_size")
    losses, weights = per_example_loss, None
    if sample_weight is not None:
        weights = expand_weights(sample_weight, losses)
    counted = global_batch_size is None and not by_weights
    count: Tensor | float
    if torch.compiler.is_compiling():
        count, losses, weights = _measured_in_a_graph(losses, weights, sample_weight, counted, batch)
    else:
        count, stand_in = _measure(losses.shape[0], (losses, sample_weight), counted, replica, batch)
        if stand_in:  # see [Note: a stand-in counts nothing, by slicing]
            losses = losses[:0]
            weights = weights[:0] if weights is not None and weights.dim() else weights
    if weights is not None:
        losses = losses * weights
        if by_weights:
            total = weights.detach().expand_as(losses).sum(dtype=torch.float64)
            if replica.num_replicas_in_sync > 1:
                total = _sum_over_towers(total)
            # Weights that are all zero make an exact zero, not 0/0.
            count = torch.where(total == 0, torch.ones_like(total), total)
    if global_batch_size is not None:
        count = global_batch_size
        if not count > 0:
            if losses.numel():
                raise ValueError(f"global_batch_size is {count}, but must be positive")
            count = 1  # nobody has examples in this step: the sum is an exact zero
    return _scale_for_averaging(sum_over(losses, count), replica)


def scale_regularization_loss(regularization_loss: Tensor | float) -> Tensor:
    """Returns this tower's share of a loss that does not depend on the batch, such as a weight penalty.

    Args:
        regularization_loss: a scalar tensor or a number, equal on all towers.

    Returns:
        The loss divided by the number of towers, so that the shares add up to it, with its full gradient, so that the
        average over towers is the gradient of the loss.

    Raises:
        RuntimeError: called outside ``strategy.run`` although a strategy with several towers exists.
    """
    replica = require_replica_context("scale_regularization_loss")
    if not isinstance(regularization_loss, Tensor):
        regularization_loss = torch.as_tensor(regularization_loss, device="cpu")
    return _scale_for_averaging(regularization_loss / replica.num_replicas_in_sync, replica)


def sum_over(losses: Tensor, count: Tensor | float) -> Tensor:
    """Returns the sum divided by ``count``. Half-precision losses are summed in float32, to avoid overflow."""
    wide = torch.promote_types(losses.dtype, torch.float32)
    return (losses.sum(dtype=wide) / count).to(losses.dtype)


def _scale_for_averaging(value: Tensor, replica: ReplicaContext) -> Tensor:
    """Returns ``value`` with its gradient multiplied by the number of towers."""
    towers = replica.num_replicas_in_sync
    if towers == 1:
        return value
    if torch.compiler.is_compiling():
        # see [Note: a compiled loss is bound when it runs]; these operations are one kernel once they are compiled
        constant = value.detach()
        return torch.where(constant.isfinite(), constant + towers * (value - constant), towers * value)
    scaled: Tensor = _ScaleGradient.apply(value, towers)
    run = replica.strategy.communicator.health.run
    if run & (run - 1) == 0 and isinstance(scaled.grad_fn, BackwardCFunction):
        # A third argument would take longer in every step. Under transforms, the node may be of another type.
        scaled.grad_fn.thread = threading.get_ident()
    return scaled


class _ScaleGradient(torch.autograd.Function):
    """The identity, with its derivative multiplied by a factor. It supports all transforms of ``torch.func``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, factor: int) -> Tensor:
        return value.clone()  # not a view of it: autograd would refuse ``loss += …``

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.factor = inputs[1]
        ctx.thread = None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.thread is not None:
            check_use(ctx, ctx.thread)
        return gradients[0] * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * ctx.factor


# torch asks for it at every call, and finding it out takes longer than the rest of the call.
_ScaleGradient.forward.__signature__ = inspect.signature(_ScaleGradient.forward)  # type: ignore[attr-defined]


def _measure(entries: int, values: Any, counted: bool, replica: ReplicaContext, batch: Any) -> tuple[int, bool]:
    """Returns the number of examples of all towers (1 on an empty share) if ``counted``, and whether losses are a
    stand-in's.

    Args:
        entries: the number of losses.
        values: the losses and their weights.
    """
    known, stand_in = replica.strategy.known_shares, False
    if known.has_stand_in or (not counted and any(share.may_stand_in for share in known.at_hand(replica.arguments))):
        from mirrored.empty_shares import loss_is_of_stand_in

        stand_in = loss_is_of_stand_in(entries, values, counted, replica, batch)
    count = global_count(0 if stand_in else entries, replica, batch=batch) if counted else 0
    return max(count, 1), stand_in  # where nobody has examples in this step the sum is an exact zero


def _measured_in_a_graph(
    losses: Tensor, weights: Tensor | None, sample_weight: Tensor | float | None, counted: bool, batch: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the count of :func:`_measure` as a tensor, and the losses and weights, zero if they do not count.

    See [Note: a compiled loss is bound when it runs].
    """
    if batch is not None and batch != () and not isinstance(batch, Tensor):
        raise TypeError("compute_average_loss in a compiled function takes a tensor of the batch as batch=, or ()")
    named = batch if isinstance(batch, Tensor) else None
    weight = sample_weight if isinstance(sample_weight, Tensor) else None
    count, kept = _traced_measure(losses.detach(), weight, named, batch is not None, counted)
    nothing = losses.new_zeros(())
    return count, torch.where(kept, losses, nothing), None if weights is None else torch.where(kept, weights, nothing)


# CUDA graphs would keep what the operators have returned: the tag keeps inductor from capturing them in one.
_operator: Any = functools.partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


@_operator(  # type: ignore[untyped-decorator]
    "mirrored::measure_losses",
    schema="(Tensor losses, Tensor? weight, Tensor? batch, bool named, bool counted) -> (Tensor, Tensor)",
)
def _traced_measure(
    losses: Tensor, weight: Tensor | None, batch: Tensor | None, named: bool, counted: bool
) -> tuple[Tensor, Tensor]:
    replica = require_replica_context("compute_average_loss")
    meant = None if not named else () if batch is None else batch
    count, stand_in = _measure(losses.shape[0], (losses, weight), counted, replica, meant)
    kept = torch.full((), not stand_in, dtype=torch.bool, device=losses.device)
    return torch.tensor(float(count), dtype=torch.float64, device="cpu"), kept


@_traced_measure.register_fake  # type: ignore[untyped-decorator]
def _(losses: Tensor, weight: Tensor | None, batch: Tensor | None, named: bool, counted: bool) -> tuple[Tensor, Tensor]:
    return torch.empty((), dtype=torch.float64, device="cpu"), losses.new_empty((), dtype=torch.bool)


@_operator("mirrored::sum_over_all_towers")  # type: ignore[untyped-decorator]
def _sum_over_towers(weight: Tensor) -> Tensor:
    """Sums over the towers. It is an operator because collectives cannot run in a transform of ``torch.func``."""
    total: Tensor = require_replica_context("compute_average_loss").all_reduce("sum", weight)
    return total


@_sum_over_towers.register_fake  # type: ignore[untyped-decorator]
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def expand_weights(sample_weight: Tensor | float, losses: Tensor) -> Tensor:
    """Returns weights of the losses' dtype and device, with a shape that broadcasts from the first dimension.

    Raises:
        ValueError: the shape does not fit.
    """
    if isinstance(sample_weight, (int, float)):
        weights = torch.full((), sample_weight, dtype=losses.dtype, device=losses.device)
    else:
        weights = sample_weight if isinstance(sample_weight, Tensor) else torch.as_tensor(sample_weight, device="cpu")
        weights = weights.to(losses.dtype)
        compiling = torch.compiler.is_compiling()
        weights = weights.to(losses.device) if compiling else on_device(weights, losses.device)
    while weights.dim() > losses.dim() and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    if tuple(weights.shape) != tuple(losses.shape)[: weights.dim()]:
        raise ValueError(
            f"sample_weight of shape {tuple(weights.shape)} does not fit losses of shape {tuple(losses.shape)}"
        )
    return weights.reshape(*weights.shape, *[1] * (losses.dim() - weights.dim()))


def global_count(local: int, replica: ReplicaContext, what: str = "the loss", batch: Any = None) -> int:
    """Returns the number of examples of this step over all towers, of which this tower has ``local``.

    On an empty share of a distributed batch it is 1, because the sum of no losses is zero for any divisor.

    Args:
        what: the name of the losses in messages.
        batch: an object of the intended distributed batch, if the script names it.

    Raises:
        ValueError: see [Note: a loss must fit its batch]; the distributed batch has another number of examples, or
        several batches could be intended.
    """
    # see [Note: batch sizes are sent with the batch]
    known = replica.strategy.known_shares
    shares = known.at_hand(replica.arguments) if batch is None else known.named(batch)
    if not shares:
        return _count_together(local, replica)
    if local == 0 and any(share.local == 0 for share in shares):
        return 1
    fitting = {share.total for share in shares if share.local == local}
    if len(fitting) == 1:
        return fitting.pop()
    sizes = ", ".join(f"{share.local} of {share.total}" for share in shares)
    if fitting:
        raise ValueError(
            f"{what} has {local} entries on tower {replica.replica_id_in_sync_group}, and so have several of its "
            f"distributed batches ({sizes} examples): pass batch=x, with a tensor x of the intended batch"
        )
    raise ValueError(
        f"{what} has {local} entries, but this tower's part of the distributed batch has {sizes} examples, so "
        "the number of entries over all towers is not known. Give one loss per example (for sequences of one length "
        "loss.view(labels.shape).mean(1); for padded ones loss.view(labels.shape) with sample_weight=mask and "
        "denominator='weights'), or pass global_batch_size. Pass batch=() if collate_fn drops or adds examples, or if "
        "the loss is of no distributed batch: then the entries of all towers are counted"
    )


def _count_together(local: int, replica: ReplicaContext) -> int:
    """Returns the sum of all towers' numbers of examples, if no distributed batch has it."""
    if replica.strategy.num_replicas_in_sync == 1:
        return local
    return int(_add_up(torch.tensor(local, device="cpu")))


@_operator("mirrored::add_up_examples")  # type: ignore[untyped-decorator]
def _add_up(local: Tensor) -> Tensor:
    """An operator for the same reason as :func:`_sum_over_towers`."""
    replica = require_replica_context("compute_average_loss")
    comm, known = replica.strategy.communicator, replica.strategy.known_shares
    counts = announce(comm, "compute_average_loss without a distributed batch", int(local))
    if not known.compared_examples:
        known.compared_examples = True
        _say_whether_shared_out(int(local), replica)
    return torch.tensor(sum(counts), device="cpu")


def _say_whether_shared_out(local: int, replica: ReplicaContext) -> None:
    """Logs once the cost of losses without a distributed batch, or that all towers received the same examples."""
    strategy = replica.strategy
    tensors = [leaf.detach() for leaf in trees.leaves(replica.arguments) if isinstance(leaf, Tensor)]
    batch = [x.cpu() for x in tensors if x.shape[:1] == (local,) and x.layout == torch.strided]
    examples = announce(strategy.communicator, "the examples of compute_average_loss", fingerprints(batch).tolist())
    if local and batch and all(other == examples[0] for other in examples):
        strategy.say_once(
            f"all {len(examples)} towers received the same {local} examples in their first step, so they train "
            "the same as one tower: a DataLoader that is not distributed gives every tower all of its examples. "
            "Iterate over strategy.distribute_dataset(loader) instead; the loader's batch size is then the "
            "global one"
        )
    else:
        strategy.say_once(
            "compute_average_loss got no batch from strategy.distribute_dataset, so in every step the towers add up "
            "how many examples they have, in a small collective: global_batch_size= or distribute_dataset saves it"
        )
