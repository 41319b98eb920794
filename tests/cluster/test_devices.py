"""Devices that are not there or that two towers would share, and options that cannot be right."""

from __future__ import annotations

import math
import os

import pytest
import torch

import mirrored
from tests.support.programs import run_program
from towers.collectives import nccl
from towers.collectives.connecting import compare_towers
from towers.launching.starting import simulate_cluster
from towers.system import devices


def see_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on torch has so many GPUs, as far as they are counted."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.row(21)
def test_no_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_program(
        ["-c", "import mirrored; print(mirrored.MirroredStrategy().device)"], env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.stdout == "cpu\n"
    assert "mirrored: 1 tower on cpu" in result.stderr
    wanted = devices.parse_all(["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match="cuda:0, cuda:1 asked for, but this process sees no GPU"):
        devices.check_exist(wanted)
    see_gpus(1, monkeypatch)
    with pytest.raises(ValueError, match="cuda:1 asked for, but this process sees only 1 GPU; check CUDA_VISIBLE"):
        devices.check_exist(wanted)


@pytest.mark.row(22)
def test_more_towers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(2, monkeypatch)
    assert devices.for_tower(1, 2, None, "torchrun") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"4 towers .* \(from torchrun\), but only 2 GPUs: start at most 2"):
        devices.for_tower(0, 4, None, "torchrun")


def test_one_visible_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun --gpus-per-task=1 shows them; that they differ is checked in the handshake."""
    see_gpus(1, monkeypatch)
    assert devices.for_tower(3, 4, None, "srun") == torch.device("cuda", 0)
    assert devices.for_tower(3, 4, [torch.device("cuda", 0)], "srun") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"2 towers .*, but only 1 GPU: .* devices=\['cpu:0', 'cpu:1'\]"):
        devices.for_tower(0, 2, None, "launch", sees_all=True)


def test_two_towers_on_one_gpu_are_found_before_nccl_starts() -> None:
    options = {"implementation": "auto"}
    message = {"options": options, "host": "h", "machine": "m", "device": "cuda:0", "accelerator": "GPU-1"}
    text = compare_towers(1, message, 0, message)
    assert text.startswith("tower 1 (on h) and tower 0 (on h) use the same GPU, cuda:0")
    assert compare_towers(1, {**message, "machine": "other"}, 0, message) is None
    message["options"] = {"implementation": "host"}
    assert compare_towers(1, message, 0, message) is None


def test_towers_on_devices_of_different_kinds() -> None:
    on_cpu = {"options": {}, "host": "a", "machine": "m", "device": "cpu:0", "accelerator": None}
    on_gpu = {"options": {}, "host": "b", "machine": "n", "device": "cuda:0", "accelerator": "GPU-1"}
    text = compare_towers(1, on_cpu, 0, on_gpu)
    assert text.startswith("tower 1 (on a) runs on cpu:0, tower 0 (on b) on cuda:0, but all towers need devices of one")


@pytest.mark.parametrize(
    ("given", "workers", "expected"),
    [
        (None, 2, ["0,1", "2,3"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 4, list(map("GPU-{}".format, "abcd"))),
    ],
)
def test_workers_that_are_played_share_the_gpus_that_are_visible(
    given: str | None, workers: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_of", lambda kind: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    cluster = {"worker": [f"127.0.0.1:{worker}" for worker in range(workers)], "ps": ["127.0.0.1:9"]}
    visible = [simulate_cluster._environment(cluster, "worker", n)["CUDA_VISIBLE_DEVICES"] for n in range(workers)]
    assert visible == expected
    assert simulate_cluster._environment(cluster, "ps", 0)["CUDA_VISIBLE_DEVICES"] == ""


def test_explicit_devices_that_contradict_the_launcher() -> None:
    with pytest.raises(ValueError, match=r"devices names 1 \(cpu:0\), but 2 towers were started .* \(from torchrun\)"):
        devices.for_tower(0, 2, ["cpu:0"], "torchrun")


def test_a_kind_is_for_all_towers() -> None:
    for named in (["cpu"], [torch.device("cpu")]):
        assert [devices.for_tower(i, 3, named, "torchrun") for i in range(3)] == [
            torch.device("cpu", i) for i in range(3)
        ]


def test_devices() -> None:
    assert [str(d) for d in devices.parse_all(["/gpu:1", "GPU:0", "cuda:2", "/device:GPU:3"])] == [
        "cuda:1",
        "cuda:0",
        "cuda:2",
        "cuda:3",
    ]
    for wrong, words in (
        (["cpu", "cpu"], "cpu:0 more than once"),
        (["cpu:0", "cuda:0"], "mixes several kinds: cpu:0, cuda:0"),
        (["tpu:0"], "device 'tpu:0' is not understood"),
        (["meta"], "device 'meta' is not understood"),
        ([], "devices is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            devices.parse_all(wrong)
    with pytest.raises(TypeError, match="must be a list of devices"):
        mirrored.MirroredStrategy("cpu:0")
    with pytest.raises(TypeError, match="must be a list of devices, such as .* not 2"):
        mirrored.MirroredStrategy(2)  # type: ignore[arg-type]


def test_nccl_uses_its_ring_on_one_host_and_chooses_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    for algorithm, on_one_host, expected in (
        (None, True, "Ring"),
        (None, False, None),
        ("ring", False, "Ring"),
        ("auto", True, None),
    ):
        nccl.choose_algorithm(algorithm, on_one_host=on_one_host)
        assert os.environ.get("NCCL_ALGO") == expected
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    nccl.choose_algorithm("ring", on_one_host=True)
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_options_are_checked() -> None:
    for field, value in (("bucket_bytes", 1.5), ("bucket_bytes", True), ("timeout_seconds", float("inf"))):
        with pytest.raises(ValueError, match=f"{field} is .* but must be a positive"):
            mirrored.CommunicationOptions(**{field: value})  # type: ignore[arg-type]
    for seconds in (0, math.nan):
        with pytest.raises(ValueError, match="step_timeout_seconds is .* \\(math.inf: no limit\\)"):
            mirrored.CommunicationOptions(step_timeout_seconds=seconds)
    for seconds in (5, math.inf):
        assert mirrored.CommunicationOptions(step_timeout_seconds=seconds).step_timeout_seconds == seconds
    with pytest.raises(ValueError, match="wire_dtype is 'float8', but must be one of same, bfloat16"):
        mirrored.CommunicationOptions(wire_dtype="float8")
