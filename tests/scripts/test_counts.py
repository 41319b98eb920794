"""What ``scripts/bench counts`` reads from a profiler's record."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import ROOT

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
        sent_mb=4.0,
        waits=1,
        early=0.25,
    )
