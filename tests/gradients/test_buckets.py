"""Buckets of gradients: their order, their flags, what travels, and the streams on which they are filled."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import mirrored
from tests.support.branches import keep_models_on_one_tower, use_one_branch_each
from tests.support.jobs import towers
from towers.collectives import communicator
from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import Alone
from towers.gradients import buckets
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import Bucket, StreamOrder
from towers.gradients.flags import Comparison
from towers.system.tensors import Named


def over_gloo(fn: Callable[..., Any], *args: Any, wire_dtype: str = "same") -> list[Any]:
    options = mirrored.CommunicationOptions(implementation="gloo", bucket_bytes=64, wire_dtype=wire_dtype)
    return towers(fn, *args, settings={"communication": options})


def exchange_in_mid_backward(strategy: mirrored.Strategy) -> list[float]:
    """A collective of the user's inside backward, while only tower 1's buckets are full before it."""
    with strategy.scope():
        early, late = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index

    def step() -> None:
        x = late(torch.full((1, 1), r + 1.0))
        total = mirrored.get_replica_context().all_reduce("sum", x)
        (early(total) if r else total * 1.0).sum().backward()

    for m in (early, late):
        nn.init.ones_(m.weight)
    strategy.run(step)
    return [float(early.weight.grad), float(late.weight.grad)]


def test_user_collectives_do_not_meet_gradient_buckets() -> None:
    # early: tower 1 alone, 3 / 2. late: the all-sum's gradient is 2 on both, times mean(1, 2).
    assert towers(exchange_in_mid_backward) == [[1.5, 3.0]] * 2


def use_in_another_order(strategy: mirrored.Strategy) -> tuple[list[list[str]], list[float], list[float]]:
    """The first layer is made last; tower 1 goes through the two branches the other way round."""
    model = strategy.mirror(
        nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("idle", "b", "a", "out", "first")})
    )
    averager = strategy.engine.averager
    layouts, losses = [], []
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(8, 8, generator=generator) for _ in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)

    def step() -> None:
        model.zero_grad()
        x = model["first"](torch.eye(8)[strategy.topology.index : strategy.topology.index + 1])
        names = ("a", "b") if strategy.is_chief else ("b", "a")
        model["out"](sum(model[name](x) for name in names)).square().mean().backward()

    for _ in range(3):
        strategy.run(step)
        layouts.append([slot.name.split(".")[1] for bucket in averager.layout.buckets for slot in bucket.slots])
        losses.append(float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)))
    model.zero_grad()
    x = model["first"](torch.eye(8)[:2])
    model["out"](model["a"](x) + model["b"](x)).square().mean().backward()
    alone = float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    return layouts, losses, [alone] * 3


def test_buckets_take_tower_0s_order_after_the_first_backward() -> None:
    (layouts, *_), (others, *_) = results = over_gloo(use_in_another_order)
    assert layouts == others
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0][0] == "out"
    assert set(layouts[0][1:3]) == {"a", "b"}
    assert layouts[0][3:] == ["first", "idle"]
    for _, ours, alone in results:
        assert ours == pytest.approx(alone, rel=1e-5)


def with_flags_through_hosts(strategy: mirrored.Strategy, few: int, fn: Callable[[mirrored.Strategy], Any]) -> Any:
    communicator.FEW = few
    averager = strategy.engine.averager
    averager._cycle._comparison = Comparison(averager._channel)  # as between GPUs
    return fn(strategy)


def use_all_in_another_order(strategy: mirrored.Strategy) -> tuple[list[list[int]], list[float]]:
    """After the first backward the closing bucket has another number of slots; flags are read when the next begins."""
    model = strategy.mirror(nn.ParameterList([torch.ones(size) for size in (20, 4, 4)]))
    averager = strategy.engine.averager
    slots = []
    for _ in range(3):
        slots.append([len(bucket.slots) for bucket in averager.layout.buckets])
        strategy.run(lambda: (model[1].mean() * model[2].mean() * model[0].mean()).backward())
    return slots[1:], [float(p.grad.sum()) for p in model]


def lay_out_anew(strategy: mirrored.Strategy) -> list[bool]:
    """Whether the memory of the first buckets is freed by the second backward, without the garbage collector."""
    model = strategy.mirror(nn.ParameterList([torch.ones(size) for size in (20, 4, 4)]))
    gc.disable()

    def step() -> None:
        model.zero_grad()
        (model[1].mean() * model[2].mean() * model[0].mean()).backward()

    strategy.run(step)
    memory = [StorageWeakRef(p.grad.untyped_storage()) for p in model]
    strategy.run(step)
    return [storage.expired() for storage in memory]


def test_the_memory_of_the_first_buckets_is_freed() -> None:
    assert over_gloo(lay_out_anew) == [[True] * 3] * 2


def test_buckets_are_laid_out_anew_before_the_flags_of_a_backward_are_read() -> None:
    for slots, gradients in over_gloo(with_flags_through_hosts, 2, use_all_in_another_order):
        assert slots == [[1, 2], [1, 2]]
        assert gradients == pytest.approx([3, 3, 3])


@pytest.mark.parametrize("few", [2, 1], ids=["gathered", "added up"])
@pytest.mark.parametrize("fn", [use_one_branch_each, keep_models_on_one_tower, use_in_another_order])
def test_flags_through_the_hosts_give_the_same(fn: Callable[[mirrored.Strategy], Any], few: int) -> None:
    assert over_gloo(with_flags_through_hosts, few, fn) == over_gloo(fn)


def gradient_on_the_wire(strategy: mirrored.Strategy) -> tuple[Tensor, Tensor]:
    model = strategy.mirror(nn.ParameterList([torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)]))
    factors = torch.randn(2, 1000, generator=torch.Generator().manual_seed(strategy.topology.index)).double()
    strategy.run(lambda: sum((p * f).sum() for p, f in zip(model, factors, strict=True)).backward())
    return model[0].grad, model[1].grad


def test_bfloat16_on_the_wire() -> None:
    factors = [torch.randn(2, 1000, generator=torch.Generator().manual_seed(i)).double() for i in range(2)]
    narrow, wide = (factors[0] + factors[1]) / 2
    for single, double in over_gloo(gradient_on_the_wire, wire_dtype="bfloat16"):
        assert torch.equal(single, single.bfloat16().float())
        assert torch.allclose(single.double(), narrow, rtol=0, atol=2**-7 * float(narrow.abs().max()))
        assert torch.allclose(double, wide, rtol=1e-14)
    for single, _ in over_gloo(gradient_on_the_wire):
        assert torch.allclose(single.double(), narrow, rtol=1e-6, atol=1e-7)


class FakeStream:
    """Notes for whom it waits."""

    def __init__(self, number: int) -> None:
        self.stream_id = number
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


def test_gradients_of_one_bucket_may_come_on_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU where a part of the model was made a CUDA graph; the streams here are none."""
    now, one, other = [FakeStream(0)], FakeStream(1), FakeStream(2)
    kept: list[tuple[Tensor, FakeStream]] = []
    monkeypatch.setattr(buckets, "current_stream_of", lambda index: now[0])
    monkeypatch.setattr(buckets, "address_of_current_stream", lambda kind: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: kept.append((tensor, stream)))
    bucket = Bucket(0, torch.float32, torch.device("cpu"))
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        bucket.add(Named("", parameter, "parameter", True))
        parameter.grad = torch.ones(3)

    bucket.streams = StreamOrder(torch.device("cuda", 0))

    def come(*streams: FakeStream) -> None:
        for now[0] in streams:
            bucket.streams.advance()

    gradients = [parameter.grad for parameter in parameters]
    come(one, one, other, one)
    assert (one.waited_for, other.waited_for) == ([other], [one])
    bucket.pack(Alone(bucket.device), 1.0)
    assert [(id(tensor), stream) for tensor, stream in kept] == [(id(gradient), one) for gradient in gradients]
    bucket.finish(lambda: [0.0, 0.0], number=1, tower=0)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    come(other, other)
    bucket.pack(Alone(bucket.device), 1.0)
    assert (len(one.waited_for), len(other.waited_for), len(kept)) == (1, 1, 2)


def test_each_arrival_on_a_gpu_is_ordered_after_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    numbers = itertools.count()
    monkeypatch.setattr(buckets, "current_stream_of", lambda index: None)
    monkeypatch.setattr(buckets, "address_of_current_stream", lambda kind: lambda index: next(numbers))  # others
    for owner, name in ((StreamOrder, "advance"), (Bucket, "copy_in"), (Bucket, "pack")):
        method = getattr(owner, name)

        def noting(*args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            did.append(_name)
            return _method(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    averager = GradientAverager(Alone(torch.device("cpu")))
    model = nn.ParameterList([torch.ones(1200, 1000), torch.ones(3)])  # the first one has more than 4 MiB
    averager.add([Named(name, p, "parameter", True) for name, p in model.named_parameters()])
    for bucket in averager.layout.buckets:
        bucket.streams = StreamOrder(torch.device("cuda", 0))
    (model[1].sum() * model[0].sum()).backward()
    assert did[:3] == ["advance", "copy_in", "advance"]
    assert did[did.index("copy_in") - 1] == "advance"
    assert did[3:] == ["advance", "pack"]


def test_a_bucket_waits_for_gradients_that_the_last_backward_did_not_have() -> None:
    averager = GradientAverager(Alone(torch.device("cpu")), bucket_bytes=2 * CHUNK_ALIGNMENT)
    parameters = nn.ParameterList([torch.ones(3) for _ in range(6)])
    averager.add([Named(name, p, "parameter", True) for name, p in parameters.named_parameters()])
    assert [len(bucket.slots) for bucket in averager.layout.buckets] == [3, 3]
    for used in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]):
        product = torch.ones(3)
        for number in used:
            parameters[number].grad = None
            product = product * parameters[number]
        product.sum().backward()
        for number in used:
            assert torch.equal(parameters[number].grad, torch.ones(3))
