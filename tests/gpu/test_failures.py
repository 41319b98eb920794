"""Towers of NCCL that die, raise or hang: the other one ends in seconds, and names the tower."""

from __future__ import annotations

import re

import pytest

from tests.gpu.pairs import start_pair
from tests.support.jobs import ROOT

pytestmark = pytest.mark.gpu

PROGRAM = str(ROOT / "tests" / "programs" / "gpu_failure.py")


@pytest.mark.parametrize(("how", "deadline", "limit"), [("die", 600, 20), ("raise", 600, 20), ("sleep", 10, 25)])
def test_the_other_tower_ends_and_names_the_one_that_failed(how: str, deadline: int, limit: float) -> None:
    patience = 2 if how == "sleep" else limit  # the other one fails first, and sleeps for ever
    first, second = start_pair([PROGRAM, how, str(deadline)], limit=55, patience=patience)
    assert first.code not in (0, None), first.err
    assert "tower 1" in first.err, first.err
    if how == "sleep":  # the other GPU waits in a collective that tower 1 has not called
        assert re.search(r"\ngroup .*: (tower 0 is in|.*; tower 0 is in) number \d+", first.err), first.err
    took = first.at - float(second.out.split()[0])
    print(f"{how}: {took:.1f} s\n{first.err}")
    assert took < limit
