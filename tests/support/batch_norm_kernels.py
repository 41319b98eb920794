"""The five functions that torch has for its SyncBatchNorm on CUDA, for CPU tensors, after what torch documents of them.

They let the code around them run without a GPU. ``tests/gpu`` runs it with torch's own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import towers.batch_norm


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1 for _ in x.shape[2:]))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather(
    x: Tensor,
    means: Tensor,
    deviations: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """As torch's kernel: one tower after the other, with divisions by the number of values so far."""
    number, mean, squares = counts.new_zeros(()), torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for count, other, deviation in zip(counts, means, deviations, strict=True):
        share = 1 / (number + count)
        squares = squares + (deviation.pow(-2) - eps) * count + (mean - other).square() * number * count * share
        mean = number * share * mean + count * share * other
        number = number + count
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean, momentum)
        running_variance.lerp_(squares / (number - 1), momentum)
    return mean, (squares / number + eps).rsqrt()


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, deviation: Tensor, eps: float
) -> Tensor:
    y = (x - _wide(mean, x)) * _wide(deviation, x)
    y = y if weight is None else y * _wide(weight, x)
    return y if bias is None else y + _wide(bias, x)


def _sums(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor | None,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, ...]:
    assert weight is not None or not (of_weight or of_bias)  # torch takes their dtype from it
    sums, products = dy.sum(_dims(x)), (dy * (x - _wide(mean, x))).sum(_dims(x))
    return sums, products, products * deviation, sums.clone()


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    total = counts.sum()
    scale = deviation if weight is None else weight * deviation
    slope = products / total * deviation.square()
    return (dy - _wide(sums / total, x) - (x - _wide(mean, x)) * _wide(slope, x)) * _wide(scale, x)


@functools.cache
def use() -> torch.library.Library:
    """From now on, layers of this process use them."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_stats", _stats, "CPU")
    library.impl("batch_norm_gather_stats_with_counts", _gather, "CPU")
    library.impl("batch_norm_elemt", _normalise, "CPU")
    library.impl("batch_norm_backward_reduce", _sums, "CPU")
    library.impl("batch_norm_backward_elemt", _input_gradient, "CPU")
    towers.batch_norm._has_kernels = lambda x, running, momentum: isinstance(momentum, float)
    return library
