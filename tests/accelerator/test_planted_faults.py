"""Mistakes that are easily made with devices, planted one at a time: the simulated accelerator finds each."""

from __future__ import annotations

import ctypes
import pathlib
from typing import Any, NamedTuple

import pytest
import torch

from tests import simulated_device
from tests.accelerator import cases, stream_cases
from tests.accelerator.plant import with_fault
from tests.accelerator.server import Server

pytestmark = pytest.mark.extended

SMALL = {"bucket_bytes": 512}


class Fault(NamedTuple):
    module: str
    right: str
    wrong: str
    case: Any
    args: tuple[Any, ...] = ()
    towers: int = 2
    way: str = "host"


FAULTS = {
    "a gradient is sent before it is computed": Fault(
        "towers.collectives.host_staged",
        "self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))",
        "pass",
        cases.train,
        (SMALL,),
    ),
    "a gradient is averaged before it has come": Fault(
        "towers.collectives.host_staged", "copy.get()) for _, copy", "copy._copy) for _, copy", cases.train, (SMALL,)
    ),
    "device memory is read as if it were the host's": Fault(
        "towers.system.tensors",
        "self._copy.copy_(tensor, non_blocking=True)",
        "__import__('ctypes').memmove(self._copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)",
        cases.values,
    ),
    "the averaged gradient goes back on a stream that nobody waits for": Fault(
        "towers.collectives.host_staged",
        "            average.wait()\n            tensor.copy_(copy.get(), non_blocking=True)",
        "            average.wait()\n"
        "            self._stream.__enter__()\n"
        "            tensor.copy_(copy.get(), non_blocking=True)\n"
        "            self._stream.__exit__(None, None, None)",
        cases.train,
        (SMALL,),
    ),
    "gradients are used before the device's collective has ended": Fault(
        "towers.collectives.process_group", "self._work.wait()", "pass", cases.train, (SMALL,), way="collectives"
    ),
    "a batch is used before it has come": Fault(
        "mirrored.data.dataset", "stream.wait_event(copied)", "pass", stream_cases.batches_arrive_whole, towers=1
    ),
    "a batch's memory is given away while it is used": Fault(
        "mirrored.data.dataset",
        "leaf.record_stream(stream)",
        "pass",
        stream_cases.batches_kept_by_queued_copies,
        towers=1,
    ),
    "a value is read before it has come": Fault(
        "towers.system.tensors", "self._arrived.synchronize()", "pass", cases.values
    ),
    "a copy counts as come at once": Fault(
        "towers.system.tensors",
        "self._arrived = torch.Event(tensor.device)",
        "self._arrived = None; return",
        cases.find_a_changed_bit,
    ),
    "gradients of two streams are packed without order": Fault(
        "towers.gradients.buckets", "stream.wait_stream(before)", "pass", stream_cases.gradients_of_two_streams
    ),
    "a bucket lies on the first device": Fault(
        "towers.gradients.buckets",
        "channel.allocate(self.key, numel, self.dtype, self.device)",
        "channel.allocate(self.key, numel, self.dtype, torch.device(self.device.type, 0))",
        cases.train,
        (SMALL,),
    ),
    "the device's generator is not seeded": Fault(
        "mirrored.seeds", "accelerator.manual_seed(seed, device)", "pass", stream_cases.random_numbers
    ),
    "the device's generator is not put back": Fault(
        "mirrored.generators", "accelerator.set_rng_state(place.device, device)", "pass", stream_cases.random_numbers
    ),
    "usage flags are read from the device": Fault(
        "towers.gradients.cycle", 'channel.device.type == "cpu"', "True", cases.step_without_waiting, ("unused",)
    ),
    "a check waits for the device": Fault(
        "mirrored.attached.mirror_check",
        'self._read_later = comm.device.type != "cpu"',
        "self._read_later = False",
        cases.find_a_changed_bit,
    ),
    "heads of a check are read at once": Fault(
        "towers.collectives.labelled",
        'if rows.device.type == "cpu":',
        "if True:",
        cases.batch_norm_over_both,
        (["torch.float32"],),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_found(name: str, server: Server) -> None:
    if server.kind != "sim":
        pytest.skip("a GPU is too quick for most of them")
    fault = FAULTS[name]
    names = ["sim:0", "sim:1"][: fault.towers]
    try:
        result = server.towers(with_fault, tuple(fault[:3]), fault.case, *fault.args, devices=names, way=fault.way)
    except AssertionError as error:  # a tower has failed
        print(str(error).strip().splitlines()[-1])
        return
    print(result)
    assert result != server.towers_once(fault.case, *fault.args, devices=names, way=fault.way)


def test_a_generator_that_is_not_saved_is_found(server: Server, tmp_path: pathlib.Path) -> None:
    if server.kind != "sim":
        pytest.skip("once is enough")
    fault = ("mirrored.generators", "[device.type, accelerator.get_rng_state(device)]", "None")

    def train(name: str, stop: int | None) -> list[Any]:
        args = (fault, cases.train_with_checkpoints, str(tmp_path / name), stop)
        return server.towers(with_fault, *args, devices=["sim:0", "sim:1"])

    [whole, _] = train("whole", None)
    train("parts", 6)
    [resumed, _] = train("parts", None)
    assert resumed[2] == 4
    assert resumed[0] != whole[0]


def read_by_address() -> None:
    ctypes.string_at(torch.ones(3, device="sim:0").data_ptr(), 4)


def test_a_read_without_a_copy_ends_the_process(server: Server) -> None:
    if reason := simulated_device.why_not():
        pytest.skip(reason)
    if server.kind != "sim":
        pytest.skip("CUDA's memory may be mapped")
    with pytest.raises(AssertionError, match="signal 11|SIGSEGV"):
        server.towers(read_by_address, devices=["sim:0"])
