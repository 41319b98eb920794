"""The accelerators that there are: the simulated one, and NVIDIA's GPUs under scripts/gpu_check.

MIRRORED_SIMULATED=tpu lets the simulated one be a TPU, for all tests that have a meaning there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import simulated_device
from tests.accelerator.server import Server

_KINDS = ["sim", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=_KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Runs functions on towers of an accelerator."""
    kind: str = request.param
    if kind == "sim" and (reason := simulated_device.why_not()):
        pytest.skip(reason)
    if kind == "sim":
        kind = os.environ.get("MIRRORED_SIMULATED", kind)
    server = Server(kind)
    yield server
    server.close()


@pytest.fixture(params=["host", "collectives"])
def way(request: pytest.FixtureRequest, server: Server) -> str:
    """How towers average: through their hosts, or by a backend of torch.distributed, which GPUs have in NCCL."""
    way: str = request.param
    if server.kind == "cuda" and way != "host":
        pytest.skip("tests/gpu has NCCL")
    if server.kind == "tpu" and way == "host":
        pytest.skip("TPUs have collectives")
    return way


@pytest.fixture
def pair(server: Server) -> list[str]:
    """Devices for two towers: two, or one that they share."""
    return ["cuda:0", "cuda:0"] if server.kind == "cuda" else [f"{server.kind}:0", f"{server.kind}:1"]


@pytest.fixture
def on_both(server: Server, pair: list[str]) -> Callable[..., Any]:
    """``on_both(fn, *args, way=…)``: what a function gives on both devices, the same on both."""

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        first, second = server.towers(fn, *args, devices=pair, **options)
        assert first == second
        return first

    return run
