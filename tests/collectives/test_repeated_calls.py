"""Calls that are repeated in steps are announced while they are new, and noted afterwards."""

from __future__ import annotations

import pytest
import torch

from towers.collectives.agreement import RepeatedCalls
from towers.collectives.communicator import Alone


def calls_of(announced: list[str]) -> RepeatedCalls:
    calls = RepeatedCalls(Alone(torch.device("cpu")))
    calls.announce = announced.append  # type: ignore[method-assign]
    return calls


def test_a_call_is_announced_until_it_is_repeated() -> None:
    announced: list[str] = []
    calls = calls_of(announced)
    for _ in range(3):
        for call in ("steps", "reduces", "reduces"):
            calls.compare(call)
        assert calls.take() == ["steps", "reduces", "reduces"]
    assert announced == ["steps", "reduces"]


def test_a_call_is_new_again_after_eight_backwards_without_it() -> None:
    announced: list[str] = []
    calls = calls_of(announced)
    calls.compare("reduces")
    for backwards, times in ((7, 1), (8, 2)):
        for _ in range(backwards):
            calls.take()
        calls.compare("reduces")
        assert len(announced) == times


def test_a_call_that_is_refused_is_none() -> None:
    """All towers refuse it, and the script may catch the error: the numbers stay equal."""
    calls = calls_of([])
    calls.compare("steps")
    before = calls._comm.health.calls

    def refuse() -> None:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError, match="^$"):
            calls.compare_by("reduces", refuse)
    assert calls._comm.health.calls == before == ((0, "steps"),)
    assert calls.take() == ["steps"]


def test_many_calls_are_kept_as_one() -> None:
    """An evaluation may reduce without end, between two backwards."""
    one, other = calls_of([]), calls_of([])
    for number in range(200):
        one.compare("reduces")
        other.compare("reduces" if number != 70 else "steps")
    kept, others = one.take(), other.take()
    assert kept != others
    assert len(kept) < 64
    assert kept[0].startswith("runs 64 calls")
    assert one._comm.health.calls[-1] == (199, "reduces")
