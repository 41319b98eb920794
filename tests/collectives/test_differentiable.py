"""Gradients through collectives, against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mirrored
from tests.support.jobs import GLOO, failures, towers


def through_all_reduce(strategy: mirrored.Strategy) -> list[tuple[float, float]]:
    r = strategy.topology.index

    def step(op: str) -> tuple[float, float]:
        x = torch.tensor([1.0, 3.0][r], requires_grad=True)
        y = mirrored.get_replica_context().all_reduce(op, x) * [1.0, 3.0][r]
        y.backward()
        return float(y.detach()), float(x.grad)

    return [strategy.run(step, args=(op,)) for op in ("sum", "mean")]


def test_gradients_of_an_all_sum_and_an_all_mean_are_those_of_the_gradients() -> None:
    assert towers(through_all_reduce) == [[(4, 4), (2, 2)], [(12, 4), (6, 2)]]


def through_all_gather(strategy: mirrored.Strategy) -> tuple[list[float], list[float]]:
    r = strategy.topology.index

    def step() -> tuple[list[float], list[float]]:
        x = torch.arange(r + 1.0, requires_grad=True)
        joined = mirrored.get_replica_context().all_gather(x)
        # Tower 0 weighs the entries 1, 10, 100, tower 1 twice that: the gradient is the sum of both.
        (joined * torch.tensor([1.0, 10.0, 100.0]) * (r + 1)).sum().backward()
        return joined.tolist(), x.grad.tolist()

    return strategy.run(step)


def test_gradient_of_an_all_gather_is_the_own_slice_of_the_sum() -> None:
    assert towers(through_all_gather) == [([0, 0, 1], [3]), ([0, 0, 1], [30, 300])]


def twice_differentiated(strategy: mirrored.Strategy) -> list[float]:
    """Of (x0 + x1)^3 on each of two towers, and of the joined values' cubes."""

    def step() -> list[float]:
        context, found = mirrored.get_replica_context(), []
        for collect in (lambda x: context.all_reduce("sum", x), context.all_gather):
            x = torch.tensor([[1.0, 2.0][strategy.topology.index]], requires_grad=True)
            (first,) = torch.autograd.grad(collect(x).pow(3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            found += [first.item(), second.item()]
        return found

    return strategy.run(step)


def test_second_derivatives() -> None:
    # What is differentiated is the sum over both towers. All-sum, s = 3: of 2 s³, 6 s²; of two such, 24 s.
    # All-gather: of 2 x0³ + 2 x1³, 6 x²; of the sum of both, 12 x.
    assert towers(twice_differentiated) == [[54, 72, 6, 12], [54, 72, 24, 24]]


def through_structures(strategy: mirrored.Strategy) -> list[object]:
    r = strategy.topology.index

    def step() -> list[object]:
        a, b = torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
        context = mirrored.get_replica_context()
        result = context.all_reduce("sum", {"a": a, "fixed": torch.tensor(r), "b": [b, 2.0]})
        (result["a"].sum() * (r + 1) + result["b"][0].sum()).backward()
        return [result["a"].tolist(), int(result["fixed"]), result["b"][1], a.grad.tolist(), b.grad.tolist()]

    return strategy.run(step)


def test_structures_mix_tracked_and_untracked_values() -> None:
    for result in towers(through_structures):
        assert result == [[2, 2], 1, 4.0, [3, 3], [2, 2, 2]]


def through_max(strategy: mirrored.Strategy) -> None:
    strategy.run(lambda: mirrored.get_replica_context().all_reduce("max", torch.ones(1, requires_grad=True)))


def test_max_has_no_gradient_and_says_so() -> None:
    for error in failures(through_max):
        with pytest.raises(RuntimeError, match=r"all_reduce\('max'\) has no gradient; detach\(\) the value"):
            raise error


def normalise_over_the_global_batch(strategy: mirrored.Strategy) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=g, dtype=torch.float64)
    weights = torch.randn(7, 3, generator=g, dtype=torch.float64)
    start, end = (0, 4) if strategy.topology.index == 0 else (4, 7)
    own = x[start:end].clone().requires_grad_()

    def step() -> None:
        total, squares, count = mirrored.get_replica_context().all_reduce(
            "sum", [own.sum(0), (own**2).sum(0), float(len(own))]
        )
        normal = (own - total / count) / (squares / count - (total / count) ** 2).sqrt()
        (normal * weights[start:end]).sum().backward()

    strategy.run(step)
    whole = x.clone().requires_grad_()
    normal = (whole - whole.mean(0)) / whole.var(0, unbiased=False).sqrt()
    (normal * weights).sum().backward()
    return own.grad, whole.grad[start:end]


def test_statistics_over_all_towers_have_the_single_device_gradient() -> None:
    for own, expected in towers(normalise_over_the_global_batch):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def merge(strategy: mirrored.Strategy) -> tuple[object, object]:
    def step(x: int) -> object:
        inside = mirrored.get_replica_context()

        def across(merged: mirrored.Strategy, value: int) -> tuple[bool, object]:
            assert mirrored.in_cross_replica_context()
            assert mirrored.get_replica_context() is None
            return merged is strategy, merged.reduce("sum", value)

        result = inside.merge_call(across, args=(x,))
        assert not mirrored.in_cross_replica_context()
        return result

    return strategy.run(step, args=(strategy.topology.index + 1,))


def test_merge_call_is_in_cross_replica_context() -> None:
    assert towers(merge) == [(True, 3), (True, 3)]


def gather_rows_at_once(strategy: mirrored.Strategy, device: str) -> list[str]:
    """What GPUs do, on two CPU towers: the backend's gathering into one tensor."""
    communicator = strategy.communicator
    if device == "gpu":
        communicator.backend = "nccl"
        Tensor.is_cuda = property(lambda tensor: True)
    x = torch.arange(12).view(3, 4) * (communicator.index + 1)
    found = []
    for mine in (x[1, 1], x[:0], x.t(), x[:, ::2], x > 5, x.bfloat16(), x.to(torch.complex64)):
        pending, later = communicator.start_all_gather(mine)
        now = communicator.all_gather(mine)
        pending.wait()
        found += [f"{rows.dtype} {rows.tolist()}" for rows in (now, later)]
    return found


def test_rows_are_the_same_gathered_at_once() -> None:
    [listed, _], [at_once, other] = (towers(gather_rows_at_once, kind, settings=GLOO) for kind in ("cpu", "gpu"))
    assert at_once == other == listed
