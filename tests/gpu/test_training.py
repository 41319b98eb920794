"""Training that only an NVIDIA GPU shows. Run by scripts/gpu_check; every test skips cleanly without one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pathlib
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import mirrored
from tests.faults import training
from tests.gpu.pairs import on_one_gpu, run_pair
from tests.support.jobs import ROOT, assert_close, make_data, make_mlp, parameters_of, run_program

pytestmark = pytest.mark.gpu


def train(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = strategy.distribute_dataset(TensorDataset(*make_data(66, torch.float32)), 32, shuffle=True)

    def step(x: Tensor, y: Tensor) -> None:
        assert x.device == strategy.device
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for _ in range(3):
        for batch in data:
            strategy.run(step, args=batch)
    return [p.cpu() for p in parameters_of(model)]


def train_alone() -> tuple[str, list[Tensor]]:
    strategy = mirrored.MirroredStrategy()
    return strategy.communicator.backend, train(strategy)


def test_nccl_at_world_size_one() -> None:
    [(backend, parameters)] = mirrored.launch(train_alone, devices=["cuda:0"], timeout=120)
    assert backend == "nccl"
    assert_close(parameters, train(mirrored.OneDeviceStrategy("cuda:0")), 1e-6)
    assert_close(parameters, train(mirrored.OneDeviceStrategy("cpu:0")), 1e-4)


def test_two_nccl_ranks_on_one_gpu() -> None:
    first, second = run_pair([str(ROOT / "tests" / "programs" / "gpu_pair.py")])
    single = first.pop("single")
    assert first == second
    assert first["backend"] == "nccl"
    assert first["towers"] == 2
    assert first["reduce"] == [3]
    assert first["mean of numbers"] == 1.5
    assert first["gather"] == [[0], [1], [1]]
    assert first["gradient of all-sum"] == 4
    assert first["trained"] == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert first["compiled"] == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert first["autocast"] == pytest.approx(single, rel=5e-2, abs=5e-2)


def step_without_waiting(part: str) -> list[float]:
    """Steps that must not make the host wait for the GPU: an exception, where one does. The fourth has a check."""
    virtual = 4 if part == "virtual" else None
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=4, virtual_towers=virtual)
    with strategy.scope():
        model = torch.nn.Sequential(*make_mlp(torch.float32), torch.nn.BatchNorm1d(3)).to(strategy.device)
        unused = torch.nn.Linear(3, 3, device=strategy.device)
    model[0].requires_grad_(part != "frozen")
    optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1, momentum=0.9, foreach=True)
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))
    weight = {"number": 0.5, "weights": torch.full((32,), 0.5)}.get(part)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        output = model(x) + (unused(torch.ones_like(model(x))) if part == "all" else 0)
        return F.cross_entropy(output, y, reduction="none")

    def step() -> None:
        optimizer.zero_grad()
        if virtual is not None:
            strategy.backward(losses, x, y)
        else:
            mirrored.compute_average_loss(losses(x, y), weight).backward()
        optimizer.step()

    strategy.run(step)
    strategy.run(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            strategy.run(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(p.sum()) for p in model.parameters()]


@pytest.mark.parametrize("part", ["all", "unused", "frozen", "number", "weights", "virtual"])
def test_a_step_does_not_wait_for_the_gpu(part: str) -> None:
    # One rank has no hooks; two on one GPU are started as in test_two_nccl_ranks_on_one_gpu.
    results = on_one_gpu(step_without_waiting, part)
    assert results[0] == results[1]


def same_bits(towers: str) -> str:
    """A digest after some steps of virtual towers; ``towers``: "one" or "two"."""
    torch.use_deterministic_algorithms(True)
    if towers == "one":
        strategy: mirrored.Strategy = mirrored.OneDeviceStrategy("cuda:0", virtual_towers=4, seed=0)
    else:
        strategy = mirrored.MirroredStrategy(virtual_towers=4, seed=0)
    with strategy.scope():
        layers = (torch.nn.Linear(5, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3))
        model = torch.nn.Sequential(*layers).to(strategy.device)
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64, device="cpu"))
        model.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = strategy.distribute_dataset(TensorDataset(*make_data(60, torch.float32)), 24, shuffle=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        optimizer.step()
        return loss

    losses = [strategy.run(step, args=batch) for batch in data]
    assert model.calls == len(losses)
    values = [value.detach().double().flatten().cpu() for value in (*model.parameters(), *model.buffers(), *losses)]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()


def test_virtual_towers_give_the_same_bits_on_one_and_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    two = on_one_gpu(same_bits, "two")
    [one] = mirrored.launch(same_bits, ("one",), devices=["cuda:0"], timeout=120)
    assert two == [one, one]


def train_with_a_graph(graphed: str) -> list[float]:
    """``graphed``: "nothing", "all", or "half", where gradients of one bucket come on several streams."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        wide = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
        model.extend(wide.to(strategy.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))
    called: Any = model
    if graphed == "all":
        called = torch.cuda.make_graphed_callables(model, (x,))
    elif graphed == "half":
        first = torch.cuda.make_graphed_callables(model[:3], (x,))
        called = torch.nn.Sequential(first, model[3:])

    def step() -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(called(x), y, reduction="none")).backward()
        optimizer.step()

    for _ in range(4):
        strategy.run(step)
    return [float(p.double().sum()) for p in model.parameters()]


def forward_as_a_graph(part: str) -> list[float]:
    """A CUDA graph of the forward and its backward inside an averaged step, against the same without."""
    graphed = train_with_a_graph(part)
    assert graphed == pytest.approx(train_with_a_graph("nothing"), rel=1e-5, abs=1e-6)
    return graphed


@pytest.mark.parametrize("part", ["all", "half"])
def test_a_graphed_forward(part: str) -> None:
    results = on_one_gpu(forward_as_a_graph, part)
    assert results[0] == results[1]


def batch_norm_over_both() -> list[float]:
    """Uneven shares without waiting for the GPU, against plain layers; then each rank at another layer."""
    strategy = mirrored.MirroredStrategy(seed=0)
    makes = torch.nn.Identity, torch.nn.BatchNorm2d, torch.nn.BatchNorm2d
    with strategy.scope(sync_batch_norm=True):
        model = torch.nn.Sequential(*(make(4) for make in makes))
    plain = torch.nn.Sequential(*(make(4) for make in makes)).to(strategy.device)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        whole = torch.randn(11, 4, 6, 6, generator=torch.Generator().manual_seed(0)).to(strategy.device, dtype)
        own = slice(0, 4) if strategy.is_chief else slice(4, 11)
        xs = [whole[own].clone().requires_grad_(), whole.clone().requires_grad_()]

        def step(part: Tensor = xs[0]) -> Tensor:
            model.zero_grad()
            y = model(part)
            (2 * y.float().pow(3).sum()).backward()
            return y

        strategy.run(step)
        xs[0].grad = None
        plain.load_state_dict(model.state_dict())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = strategy.run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain.zero_grad()
        expected = plain(xs[1])
        expected.float().pow(3).sum().backward()
        assert y.dtype == dtype
        assert_close([y, xs[0].grad / 2], [expected[own], xs[1].grad[own]], tolerance)
        gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
        assert_close(*gradients, 10 * tolerance)
        assert_close(list(model.buffers()), list(plain.buffers()), 1e-4)
    trained = [float(buffer.double().sum()) for buffer in model.buffers()]
    norm = model[1 if strategy.is_chief else 2]
    assert strategy.run(lambda: norm(xs[0])).isnan().all()
    torch.cuda.synchronize()
    with pytest.raises(mirrored.DisagreementError, match="tower 0 goes forward through Sequential.1, tower 1 goes"):
        strategy.run(lambda: norm(xs[0]))
    return trained


def test_batch_norm_over_both() -> None:
    results = on_one_gpu(batch_norm_over_both)
    assert results[0] == results[1]


def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Checkpoints hold a GPU's tensors and its random numbers."""

    def run(name: str, stop: int | None) -> dict[str, Any]:
        with contextlib.suppress(training.Interrupted):
            return training.train(mirrored.OneDeviceStrategy("cuda:0", seed=0), tmp_path / name, stop=stop)
        return {}

    whole = run("whole", None)
    run("parts", 6)
    resumed = run("parts", None)
    assert resumed["restored"].step == 4
    assert resumed["digest"] == whole["digest"]
    assert resumed["losses"] == whole["losses"]


@pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="the digits come with scikit-learn")
def test_digits_on_the_gpu(tmp_path: pathlib.Path) -> None:
    for package in ("tqdm", "matplotlib", "safetensors"):
        pytest.importorskip(package)
    words = [str(ROOT / "examples" / "digits.py"), "--devices", "cuda:0", "--output", str(tmp_path)]
    result = run_program(words, timeout=300, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    match = re.search(r"test accuracy ([0-9.]+)%", result.stdout)
    assert match
    assert float(match[1]) >= 97
    assert "1 tower on NVIDIA" in result.stderr
