"""What is decided before NCCL makes a group; NCCL itself is tested in ``tests/gpu``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os

import pytest
import torch

from towers.collectives import nccl
from towers.collectives.nccl import check_bound, without_abort

ABORTS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def test_a_default_group_on_another_gpu_is_refused() -> None:
    check_bound(None, torch.device("cuda:0"))
    check_bound(torch.device("cuda:0"), torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"NCCL on cuda:1, but this tower's device is cuda:0: give .*device_id="):
        check_bound(torch.device("cuda:1"), torch.device("cuda:0"))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("by_user", [None, "3"])
def test_our_groups_are_made_so_that_errors_wait_for_the_watch(
    at_once: bool, by_user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "nccl_aborts_at_once", lambda: at_once)
    monkeypatch.delenv(ABORTS, raising=False)
    if by_user is not None:
        monkeypatch.setenv(ABORTS, by_user)
    with without_abort():
        assert os.environ.get(ABORTS) == (by_user or ("0" if at_once else None))
    assert os.environ.get(ABORTS) == by_user


@pytest.mark.parametrize("package", ["nvidia-nccl-cu12", "nvidia-nccl-cu13"])
def test_the_packaged_nccl_loads_and_is_the_version_it_says(package: str) -> None:
    """Torch's CUDA wheels bring one of them; the extra ``cu12`` names the first. Loading it needs no GPU."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    (library,) = [file for file in distribution.files or [] if file.name == "libnccl.so.2"]
    number = ctypes.c_int()
    assert ctypes.CDLL(str(distribution.locate_file(library))).ncclGetVersion(ctypes.byref(number)) == 0
    version = (number.value // 10_000, number.value // 100 % 100, number.value % 100)
    assert ".".join(map(str, version)) == ".".join(distribution.version.split(".")[:3])
    assert version >= (2, 27, 0)
