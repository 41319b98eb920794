"""Messages on torch's records of collectives. (``test_waiting_towers.py`` tests towers that hang.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SETTINGS, towers
from tests.support.waiting import wait_until
from towers.health import flight_recorder
from towers.health.flight_recorder import Entered, describe, entered


def record(
    number: int, state: str, name: str = "nccl:all_reduce", group: tuple[str, str] = ("0", "default_pg"), **others: Any
) -> dict[str, Any]:
    """A record in the form of torch's (``FlightRecorderDetail.hpp``)."""
    return {
        "collective_seq_id": number,
        "state": state,
        "profiling_name": name,
        "process_group": list(group),
        "input_dtypes": ["Float"],
        "input_sizes": [[number, 2]],
        "is_p2p": False,
        "retired": False,
        **others,
    }


def test_a_gpu_is_in_the_first_collective_that_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        record(1, "completed", retired=True),
        record(2, "started", retired=True),  # NCCL's watchdog has found its deadline passed
        record(3, "scheduled"),
        record(9, "scheduled", is_p2p=True, group=("1", "undefined")),
        record(4, "completed", "nccl:broadcast", ("2", "undefined")),
    ]
    monkeypatch.setattr(flight_recorder, "recorded_collectives", lambda: records)
    assert entered() == {
        "0 (default_pg)": Entered(2, "all_reduce of Float [2, 2]", ended=False),
        "2": Entered(4, "broadcast of Float [4, 2]", ended=True),
    }


def test_only_groups_that_may_explain_a_wait_are_shown() -> None:
    one, two = Entered(1, "all_reduce of Float [3]", ended=True), Entered(2, "barrier", ended=False)
    assert describe({0: {"a": one}, 1: {"a": one}}) == ""
    assert describe({0: {}, 1: {}}) == ""
    lines = describe({0: {"a": one, "b": two, "c": one}, 1: {"a": one, "b": two}, 2: {"a": one, "c": two}})
    assert lines.splitlines()[1:] == [
        "group b: towers 0 and 1 are in number 2, barrier",
        "group c: tower 0 last called number 1, all_reduce of Float [3]; tower 2 is in number 2, barrier",
    ]


def call_collectives(_: Any) -> dict[str, Entered]:
    group = dist.new_group([0, 1], group_desc="of the script")
    dist.all_reduce(torch.ones(3, 4), group=group)
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0, group=group)
    last = Entered(2, "broadcast of Long [2]", ended=True)
    wait_until(lambda: last in entered().values())  # a thread of Gloo retires it after its end
    return entered()


def test_torch_records_the_collectives_of_gloo() -> None:
    for found in towers(call_collectives, settings=SETTINGS["gloo"]):
        [mine] = [place for group, place in found.items() if group.endswith(" (of the script)")]
        assert mine == Entered(2, "broadcast of Long [2]", ended=True)
