"""Batch normalisation over the global batch (Ioffe and Szegedy, 2015), forward and backward.

Every tower sends the number of values per channel in its share, their mean, and the sum of their squared deviations
from it. All towers combine these with the formula of Chan, Golub and LeVeque (1979), in tower order and in float64, and
so get the same bits. The variance is never a difference of two large sums.

The gradient with respect to a tower's input is that of the sum of all towers' losses, because each tower's output
depends on every tower's input. On N towers, a tower's loss is N times its part of the global loss (rule R3,
docs/concepts/towers.md). The gradient is therefore N times that of the global loss, as in every other layer. The
gradients of weight and bias are the tower's own sums. Averaging over the towers makes all of them correct.

[Note: torch's kernels] On CUDA, five kernels that torch has for its SyncBatchNorm do most of the arithmetic, the
combination included, in the same way but in float32. They take 15 kernels for a layer and a step, of which the check of
the labels needs 3. The general code took 57 (``scripts/bench counts``). They cannot divide by a count of 0.
SyncBatchNorm leaves empty shares out, for which the host waits. A :class:`LabelledGather` has tiny counts instead.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from towers.collectives.labelled import LabelledGather


def normalise(
    gather: LabelledGather,
    name: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float | Tensor,
    eps: float,
    counts: bool = True,
) -> Tensor:
    """Normalises every channel of ``x`` with the mean and variance of all towers' ``x``, in one collective each way.

    Args:
        gather: the collectives of the towers.
        name: the layer's name in messages; the same on all towers.
        x: shape ``(n, channels, *any)``, floating point; ``n`` and ``any`` may differ between towers and be 0.
        weight, bias: shape ``(channels,)``, or None.
        running: mean and (unbiased) variance to update in place. They do not change if all shares are empty.
        momentum: the new statistics' weight in them, a number or a tensor of one.
        eps: added to the variance.
        counts: whether ``x`` contributes to mean and variance. Otherwise, it is normalised with them as constants.

    Returns:
        As ``F.batch_norm``: shape, dtype and memory format of ``x``. Statistics are float64 for float64, otherwise
        float32. It may be differentiated any number of times.

    Raises:
        ValueError: on all towers, if they have one value per channel together (on GPUs in a later call).
        DisagreementError: on all towers, if they are at different layers (on GPUs in a later call).
    """
    function = _FusedNormalise if _has_kernels(x, running, momentum) else _Normalise
    call = _Call(gather, name, running, momentum, eps, counts)
    if counts:
        result: Tensor = function.apply(x, weight, bias, call)
        return result
    nothing = function.apply(x[:0], weight, bias, call)
    mean, variance = call.statistics
    scale, shift = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return torch.cat([nothing, F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)])


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of :func:`normalise` that need no gradient.

    Attributes:
        statistics: mean and variance of the call, if ``counts`` is False.
    """

    gather: LabelledGather
    name: str
    running: tuple[Tensor, Tensor] | None
    momentum: Any
    eps: float
    counts: bool
    statistics: list[Tensor] = dataclasses.field(default_factory=list)

    def gather_forward(self, x: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Returns every tower's number of values per channel, and its moments."""
        count = x.numel() // x.shape[1] if x.shape[1] else 0
        check = functools.partial(_refuse_a_single_value, name=self.name)
        return self.gather(f"goes forward through {self.name}", moments, count, check)

    def gather_backward(self, sums: Tensor) -> Tensor:
        """Returns every tower's sums."""
        return self.gather(f"goes backward through {self.name}", sums)[1]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        """Normalises ``x``, and appends mean and variance to ``call.statistics``."""
        channels = x.shape[1]
        counts, rows = call.gather_forward(x, _moments(x))
        total = counts.sum()
        mean, variance = _combine(counts, rows[:, :channels], rows[:, channels:], total)
        if call.running is not None:
            _follow(call.running, mean, variance, total, call.momentum)
        precise = _precise(x)
        mean, variance = mean.to(precise), variance.to(precise)
        if not call.counts:
            call.statistics.extend([mean, variance])
        ctx.save_for_backward(x, weight, mean, variance, total)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        if x.numel() == 0:
            return torch.empty_like(x)
        scale, shift = (None if t is None else t.to(precise) for t in (weight, bias))
        return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, call.eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, dweight, dbias = _differentiable_gradients(ctx, dy, x, weight, total)
        else:
            call = ctx.call
            deviation = (variance + call.eps).rsqrt()
            dweight, dbias = _own_sums(dy, x, mean, deviation, call.eps)
            dx = None
            if ctx.needs_input_grad[0]:
                rows = call.gather_backward(torch.cat([dweight, dbias]).double())
                means = (rows.sum(0) / total.clamp(min=1)).to(mean.dtype)
                scale = deviation if weight is None else deviation * weight.to(mean.dtype)
                dx = _input_gradient(dy, x, scale, mean, variance, call.eps, means)
        return _wanted(ctx, weight, dx, dweight, dbias)


class _FusedNormalise(torch.autograd.Function):
    """The same on CUDA (see [Note: torch's kernels])."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        """As :meth:`_Normalise.forward`."""
        channels, precise = x.shape[1], _precise(x)
        x = _dense(x)
        if x.numel():
            own = torch.cat(torch.batch_norm_stats(x, call.eps))
        else:
            own = torch.cat([x.new_zeros(channels, dtype=precise), x.new_ones(channels, dtype=precise)])
        counts, rows = call.gather_forward(x, own)
        running, before = call.running, []
        if running is not None and not x.numel():  # perhaps there are no values at all, and nothing to follow
            before = [tensor.clone() for tensor in running]
        to_mean, to_variance = running or (None, None)
        means, deviations = rows[:, :channels], rows[:, channels:]
        mean, deviation = torch.batch_norm_gather_stats_with_counts(
            rows, means, deviations, to_mean, to_variance, call.momentum, call.eps, counts
        )
        for tensor, old in zip(running or (), before, strict=False):
            tensor.copy_(torch.where(counts.sum() < 0.5, old, tensor))
        if not call.counts:
            call.statistics.extend([mean, deviation.pow(-2) - call.eps])
        ctx.save_for_backward(x, weight, mean, deviation, counts)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        if x.numel() == 0:
            return torch.empty_like(x)
        scale, shift = (None if t is None else t.to(precise) for t in (weight, bias))
        return torch.batch_norm_elemt(x, scale, shift, mean, deviation, call.eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, deviation, counts = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, dweight, dbias = _differentiable_gradients(ctx, dy, x, weight, counts.sum())
        else:
            dx = None
            scale = None if weight is None else weight.to(mean.dtype)
            sums = products = dweight = dbias = torch.zeros_like(mean)
            if x.numel():
                dy, given = _dense(dy), weight is not None
                sums, products, dweight, dbias = torch.batch_norm_backward_reduce(
                    dy, x, mean, deviation, scale, True, given, given
                )
                dbias = dbias if given else sums
            if ctx.needs_input_grad[0]:
                rows = ctx.call.gather_backward(torch.cat([sums, products]))
                sums, products = rows.sum(0).chunk(2)
                dx = torch.empty_like(x)
                if x.numel():
                    dx = torch.batch_norm_backward_elemt(
                        dy, x, mean, deviation, scale, sums, products, counts.to(torch.int32)
                    )
        return _wanted(ctx, weight, dx, dweight, dbias)


def _wanted(
    ctx: Any, weight: Tensor | None, dx: Tensor | None, dweight: Tensor, dbias: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns those gradients of x, weight, bias and the call that autograd needs, in the dtypes of their tensors."""
    return (
        dx,
        dweight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
        dbias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
        None,
    )


def _has_kernels(x: Tensor, running: tuple[Tensor, Tensor] | None, momentum: float | Tensor) -> bool:
    """Returns whether torch has kernels for this layer (see [Note: torch's kernels])."""
    return x.is_cuda and isinstance(momentum, float) and (running is None or running[0].dtype == _precise(x))


def _dense(x: Tensor) -> Tensor:
    """Returns ``x`` in one of the memory formats for which torch's kernels are quick."""
    last: torch.memory_format = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return x if x.dim() in (4, 5) and x.is_contiguous(memory_format=last) else x.contiguous()


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _broadcast(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *(1 for _ in x.shape[2:]))


def _moments(x: Tensor) -> Tensor:
    """Returns mean and sum of squared deviations of this tower's channels, one after the other, as float64."""
    if x.numel() == 0:
        return x.new_zeros(2 * x.shape[1], dtype=torch.float64)
    dims = _dims(x)
    x = x.to(_precise(x))
    if x.device.type == "cpu":  # torch's var_mean takes ten times as long there
        mean = x.mean(dims)
        squares = (x - _broadcast(mean, x)).square_().sum(dims)
        return torch.cat([mean, squares]).double()
    variance, mean = torch.var_mean(x, dims, correction=0)
    return torch.cat([mean.double(), variance.double() * (x.numel() // x.shape[1])])


def _refuse_a_single_value(total: int, name: str) -> None:
    if total == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, but all towers together have 1 at {name}"
        )


def _combine(counts: Tensor, means: Tensor, squares: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of all towers' values; zeros if there are none."""
    at_least_one = total.clamp(min=1)
    shares = counts.unsqueeze(1) / at_least_one
    mean = (shares * means).sum(0)
    variance = torch.addcmul(squares / at_least_one, shares, (means - mean).square_()).sum(0)
    return mean, variance


def _follow(
    running: tuple[Tensor, Tensor], mean: Tensor, variance: Tensor, total: Tensor, momentum: float | Tensor
) -> None:
    """Moves the running statistics towards the new ones, except if there are no values."""
    step = total.clamp(max=1) * momentum
    unbiased = variance * (total / (total - 1).clamp(min=1))
    for tensor, new in zip(running, (mean, unbiased), strict=True):
        tensor.copy_(tensor.double().lerp_(new, step))


def _own_sums(dy: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns this tower's sums, per channel, of gradient times normalised input and of the gradient.

    Args:
        deviation: 1 over the standard deviation.
    """
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # The weight does not affect these sums, but they are computed in its dtype.
    _, products, gradients = torch.ops.aten.native_batch_norm_backward(
        dy, x, deviation, None, None, mean, deviation, True, eps, [False, True, True]
    )
    return products, gradients


def _input_gradient(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, eps: float, means: Tensor
) -> Tensor:
    """Returns ``scale * (dy - mean(dy) - normal * mean(dy * normal))``, with normal the normalised ``x``.

    Args:
        scale: weight over standard deviation.
        means: the means, over all towers, of the quantities in :func:`_own_sums`.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    precise = mean.dtype
    with_normal, constant = (means.view(2, -1) * -scale).unbind()
    gradient = F.batch_norm(x.to(precise), mean, variance, with_normal, constant, False, 0.0, eps)
    return gradient.addcmul_(dy.to(precise), _broadcast(scale, x)).to(x.dtype)


def _differentiable_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and bias as a graph, for ``create_graph=True``, with recomputed statistics."""
    dtype = _precise(x)
    precise_x, dims, total = x.to(dtype), _dims(x), total.clamp(min=1).to(dtype)

    def global_mean(values: Tensor) -> Tensor:
        purpose = f"differentiates the backward of {ctx.call.name}"
        result: Tensor = _AllSum.apply(values.sum(dims), ctx.call.gather, purpose)
        return result / total

    centred = precise_x - _broadcast(global_mean(precise_x), x)
    deviation = _broadcast((global_mean(centred.square()) + ctx.call.eps).rsqrt(), x)
    normal = centred * deviation
    dy = dy.to(dtype)
    product = dy * normal
    dx = deviation * (dy - _broadcast(global_mean(dy), x) - normal * _broadcast(global_mean(product), x))
    if weight is not None:
        dx = dx * _broadcast(weight.to(dtype), x)
    return dx.to(x.dtype), product.sum(dims), dy.sum(dims)


class _AllSum(torch.autograd.Function):
    """The sum over all towers, whose gradient is the sum of all towers' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gather: LabelledGather, purpose: str) -> Tensor:
        ctx.gather, ctx.purpose = gather, purpose
        return gather(purpose, values.double())[1].sum(0).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllSum.apply(gradient, ctx.gather, ctx.purpose), None, None
