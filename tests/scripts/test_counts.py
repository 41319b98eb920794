"""``scripts/bench counts``: what it reads from a profiler's record, and what a step does on the simulated devices."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests import simulated_device
from tests.support.jobs import ROOT
from tests.support.waiting import HANG

pytestmark = pytest.mark.extended  # it loads much of torch


def event(kind: str, name: str, at: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": at, "dur": 1.0, "args": args}


def test_a_record_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets: the first one is sent before the last gradient is computed, the second one after."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    import counts

    nccl = {"Collective name": "allreduce", "dtype": "Float"}
    record = [
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 0),
        event("cpu_op", "c10d::allreduce_", 2),
        event("cpu_op", "record_param_comms", 2, **nccl, **{"In msg nelems": 250_000, "Out msg nelems": 250_000}),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 4),
        event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 6),
        event("cpu_op", "c10d::allreduce_", 7),
        event("cpu_op", "record_param_comms", 7, **nccl, **{"In msg nelems": 750_000, "Out msg nelems": 750_000}),
        event("cpu_op", "record_param_comms", 8, **{"Collective name": "wait"}),
        event("cpu_op", "c10d::allgather_", 8),
        event("user_annotation", "gloo:all_gather", 8),
        event("kernel", "void gemm(float)", 3),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 5),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5),
        event("gpu_memset", "Memset (Device)", 5),
        event("cuda_runtime", "cudaEventRecord", 5),
        event("cuda_runtime", "cudaStreamWaitEvent", 5),
        event("cuda_runtime", "cudaStreamSynchronize", 9),
    ]
    assert counts.count(record) == counts.Counts(
        kernels=1,
        copies=1,
        fills=1,
        events=1,
        stream_waits=1,
        collectives=2,
        host_collectives=1,
        sent_mb=8.0,
        waits=1,
        early=0.25,
    )


def counted(case: str, variants: str) -> dict[str, dict[str, float]]:
    """The printed counts by variant."""
    if reason := simulated_device.why_not():
        pytest.skip(reason)
    words = ["counts", "--simulated", "--turns", "0", "--cases", case, "--variants", variants]
    command = [sys.executable, str(ROOT / "scripts" / "benchmarks"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines() if "|" in line]
    (_, *names), _, *lines = rows
    assert [len(line) for line in lines] == [len(rows[0])] * len(variants.split(",")), done.stdout
    return {
        variant: {name: float(cell) for name, cell in zip(names, cells, strict=True) if cell != "None"}
        for variant, *cells in lines
    }


def launches(counts: dict[str, float]) -> float:
    return counts["kernels"] + counts["copies"]


def test_a_step_of_a_resnet_is_as_lean_as_those_of_others() -> None:
    """A ResNet has many small tensors, and BatchNorm."""
    of = counted("resnet-8", "bare,ours,DDP,sharded,fully-sharded,FSDP2,ZeRO,ours-sync-bn,DDP-sync-bn,ours-reduce,save")
    ours, ddp, sharded, scattered = of["ours"], of["DDP"], of["sharded"], (of["FSDP2"], of["ZeRO"])
    assert launches(ours) <= launches(of["bare"]) + 5
    assert launches(ours) <= launches(ddp)
    assert launches(sharded) <= launches(of["bare"]) + 6
    assert launches(sharded) <= 1.05 * min(map(launches, scattered))
    assert launches(of["fully-sharded"]) <= launches(of["FSDP2"]) + 3  # the scaling of the loss
    for count in ("collectives", "sent_mb", "stream_waits", "waits", "host_collectives", "early"):
        assert of["fully-sharded"][count] == of["FSDP2"][count], count
    assert of["fully-sharded"]["memory_mb"] <= of["FSDP2"]["memory_mb"] + 0.1
    assert of["ours-reduce"]["collectives"] == ours["collectives"] + 1
    for counts in (ours, sharded, of["ours-reduce"]):
        assert counts["sent_mb"] == pytest.approx(ddp["sent_mb"], rel=1e-3)
        assert (counts["waits"], counts["host_collectives"]) == (0, 0)
    assert ours["early"] == pytest.approx(ddp["early"], abs=0.002)
    layers = 20
    assert launches(of["ours-sync-bn"]) - launches(ours) <= 16 * layers
    assert (of["ours-sync-bn"]["waits"], of["DDP-sync-bn"]["waits"]) == (0, 3 * layers)  # as a GPU's profiler counts
    assert of["save"]["waits"] <= 5  # and not one for each tensor


def test_a_step_of_a_large_model_is_as_lean_as_those_of_others() -> None:
    """A model of 10 million parameters, whose gradients take most of the memory."""
    of = counted("mlp-64", "bare,ours,DDP,sharded,FSDP2,ZeRO,ours-compiled,ours-bf16,DDP-bf16")
    assert launches(of["ours"]) <= launches(of["DDP"])
    assert launches(of["sharded"]) <= 1.05 * min(launches(of["FSDP2"]), launches(of["ZeRO"]))
    assert launches(of["ours-bf16"]) <= launches(of["DDP-bf16"])
    assert of["sharded"]["sent_mb"] == pytest.approx(of["DDP"]["sent_mb"], rel=1e-3)
    assert of["ours"]["memory_mb"] == pytest.approx(of["DDP"]["memory_mb"], abs=0.2)
    assert of["sharded"]["memory_mb"] <= of["FSDP2"]["memory_mb"]
    for variant in ("ours", "ours-compiled"):
        assert of[variant]["early"] == pytest.approx(of["DDP"]["early"], abs=0.003)
