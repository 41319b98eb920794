"""Training that only an NVIDIA GPU shows. Run by scripts/gpu_check; every test skips cleanly without one."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import mirrored
from tests.accelerator import cases
from tests.gpu.pairs import on_one_gpu, run_pair
from tests.support.jobs import ROOT, assert_close, make_data, make_mlp, parameters_of
from tests.support.programs import run_program
from tests.support.readme import blocks_of_readme, scripts_of_readme
from tests.support.steps import averaging_step
from tests.support.waiting import HANG

pytestmark = pytest.mark.gpu


def train(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = strategy.distribute_dataset(TensorDataset(*make_data(66, torch.float32)), 32, shuffle=True)
    step = averaging_step(model, optimizer)
    for _ in range(3):
        for x, y in data:
            assert x.device == strategy.device
            strategy.run(step, args=(x, y))
    return [p.cpu() for p in parameters_of(model)]


def train_alone() -> tuple[str, list[Tensor]]:
    strategy = mirrored.MirroredStrategy()
    return strategy.communicator.backend, train(strategy)


def test_the_script_of_the_readme(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(scripts_of_readme()["train"])
    last = blocks_of_readme()[1].splitlines()[-1]
    result = run_program(["train.py"], cwd=str(tmp_path), env={"CUDA_VISIBLE_DEVICES": "0"}, code=0)
    assert "1 tower on NVIDIA" in result.stderr
    loss = float(result.stdout.split()[-1])
    assert loss == pytest.approx(float(last.split()[-1]), abs=1e-3)


def test_nccl_at_world_size_one() -> None:
    [(backend, parameters)] = mirrored.launch(train_alone, devices=["cuda:0"], timeout=HANG)
    assert backend == "nccl"
    assert_close(parameters, train(mirrored.OneDeviceStrategy("cuda:0")), 1e-6)
    assert_close(parameters, train(mirrored.OneDeviceStrategy("cpu:0")), 1e-4)


def test_two_nccl_ranks_on_one_gpu() -> None:
    first, second = run_pair([str(ROOT / "tests" / "programs" / "gpu_pair.py")])
    single = first.pop("single")
    assert first == second
    assert first["backend"] == "nccl"
    assert first["towers"] == 2
    assert first["trained"] == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert first["compiled"] == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert first["sharded"] == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert first["autocast"] == pytest.approx(single, rel=5e-2, abs=5e-2)


@pytest.mark.parametrize("part", ["all", "unused", "frozen", "number", "weights", "virtual"])
def test_a_step_does_not_wait_for_the_gpu(part: str) -> None:
    # One rank has no hooks; two on one GPU are started as in test_two_nccl_ranks_on_one_gpu.
    results = on_one_gpu(cases.step_without_waiting, part)
    assert results[0] == results[1]


def use_other_parameters() -> list[Any]:
    return cases.use_other_parameters(cases.PHASES)


def test_towers_that_use_other_parameters_have_the_numbers_of_the_cpu() -> None:
    first, second = on_one_gpu(use_other_parameters)
    assert first == second
    expected, _ = mirrored.launch(use_other_parameters, devices=["cpu:0", "cpu:1"], timeout=HANG)
    assert first[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)


def gathers_of_hosts() -> list[int]:
    return cases.use_other_parameters({"all": 36})[1]


def test_hosts_gather_nothing_in_a_step_if_all_towers_use_all_parameters() -> None:
    assert on_one_gpu(gathers_of_hosts) == [[1, 1, 1, 8, 8, 8, 8]] * 2


def wait_between_buckets_and_batch_norm() -> list[float]:
    return cases.wait_between_buckets_and_batch_norm("first")


def test_a_host_may_wait_for_its_gpu_before_a_batch_norm() -> None:
    first, second = on_one_gpu(wait_between_buckets_and_batch_norm)
    assert first == second
    expected, _ = mirrored.launch(wait_between_buckets_and_batch_norm, devices=["cpu:0", "cpu:1"], timeout=HANG)
    assert first == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_monitor_does_not_wait_for_the_gpu_before_it_reports() -> None:
    on_one_gpu(cases.watch_without_waiting)


def test_virtual_towers_give_the_same_bits_on_one_and_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    two = on_one_gpu(cases.same_bits)
    [one] = mirrored.launch(cases.same_bits, devices=["cuda:0"], timeout=HANG)
    assert two == [one, one]


def train_with_a_graph(graphed: str) -> list[float]:
    """``graphed``: "nothing", "all", or "half", where gradients of one bucket come on several streams."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        wide = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
        model.extend(wide.to(strategy.device))
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))
    called: Any = model
    if graphed == "all":
        called = torch.cuda.make_graphed_callables(model, (x,))
    elif graphed == "half":
        first = torch.cuda.make_graphed_callables(model[:3], (x,))
        called = torch.nn.Sequential(first, model[3:])

    step = averaging_step(called, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        strategy.run(step, args=(x, y))
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


def batch_norm() -> list[float]:
    return cases.batch_norm_over_both(["torch.float32", "torch.bfloat16"])


def test_batch_norm_over_both() -> None:
    results = on_one_gpu(batch_norm)
    assert results[0] == results[1]


DIGITS = str(ROOT / "examples" / "digits.py")


@pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="the digits come with scikit-learn")
@pytest.mark.parametrize(
    ("words", "towers", "least"),
    [
        ([DIGITS, "--devices", "cuda:0"], "1 tower", 97),
        (["-m", "torch.distributed.run", "--nproc-per-node", "1", DIGITS], "1 tower", 97),
        (["-m", "mirrored", "run", "--devices", "cuda:0,cuda:0", DIGITS, "--epochs", "2"], "2 towers", 60),
    ],
    ids=["python", "torchrun", "mirrored run"],
)
def test_digits_on_the_gpu(words: list[str], towers: str, least: float, tmp_path: pathlib.Path) -> None:
    for package in ("tqdm", "matplotlib", "safetensors"):
        pytest.importorskip(package)
    result = run_program([*words, "--output", str(tmp_path)], timeout=HANG, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    match = re.search(r"test accuracy ([0-9.]+)%", result.stdout)
    assert match
    assert float(match[1]) >= least
    assert f"{towers} on NVIDIA" in result.stderr


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        ("loss = mirrored.compute_average_loss(losses)", 0, "The same:"),
        ("loss = losses.mean()", 1, "compute_average_loss"),
    ],
    ids=["right", "wrong"],
)
def test_verify_on_the_gpu(lines: str, code: int, said: str, tmp_path: pathlib.Path) -> None:
    """Two towers that share a GPU against one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("LOSS", lines))
    words = ["-m", "mirrored", "verify", "--devices", "cuda:0,cuda:0", str(script)]
    result = run_program(words, timeout=HANG, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == code, result.stdout + result.stderr
    assert said in result.stdout


SCRIPT = """
import torch, mirrored
strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(30, 4, generator=generator), torch.randint(0, 3, (30,), generator=generator)

def step(x, y):
    optimizer.zero_grad()
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    LOSS
    loss.backward()
    optimizer.step()
    return loss

for batch in strategy.distribute_dataset(torch.utils.data.TensorDataset(x, y), 7):
    print(strategy.reduce("sum", strategy.run(step, args=batch)))
"""
