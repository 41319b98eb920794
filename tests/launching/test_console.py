"""What the launcher passes on to the terminal, and the folder that it keeps for it."""

from __future__ import annotations

import json
import pathlib
import tempfile

import pytest

from tests.support.jobs import ROOT
from tests.support.processes import await_ends
from tests.support.programs import run_command, start_command
from towers.launching import console


def test_what_a_killed_relay_left_is_cleared_away(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, foreign = tmp_path / "towers-job-killed", tmp_path / "something-else"
    for directory in (killed, foreign):
        directory.mkdir()
        (directory / "status0").write_bytes(b"")
    with console.Relay() as living:
        assert not killed.exists()
        with console.Relay():
            assert living.directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["something-else"]


@pytest.mark.extended
def test_killed_agents_leave_nothing_after_a_new_start(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "run", "--towers", "2", str(ROOT / "tests" / "programs" / "report.py")]
    environment = {"TMPDIR": str(tmp_path)}
    for _ in range(2):
        job = start_command([*words, "wait"], env=environment)
        tower = json.loads(job.stdout.readline())["pid"]
        job.kill()
        await_ends(tower)
        job.communicate()
    assert len(list(tmp_path.glob("towers-*"))) == 1
    run_command(words, env=environment, code=0)
    assert list(tmp_path.glob("towers-*")) == []


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    pieces: list[str] = []
    lines = console.prefixed_lines("[tower 1] ", pieces.append)
    for _ in range(200):
        lines("x" * 65536)
    assert max(map(len, pieces)) < 3 * 65536
    assert sum(piece.count("x") for piece in pieces) == 200 * 65536
