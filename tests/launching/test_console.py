"""What the launcher passes on to the terminal, and the folder that it keeps for it."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time

import pytest

from towers.launching import console


def test_what_a_killed_relay_left_is_cleared_away(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, foreign = tmp_path / "towers-killed", tmp_path / "something-else"
    for directory in (killed, foreign):
        directory.mkdir()
        (directory / "status0").write_bytes(b"")
        os.utime(directory, (1, 1))
    with console.Relay() as living:
        os.utime(living.directory, (1, 1))
        assert not killed.exists()
        with console.Relay():
            assert living.directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["something-else"]


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    pieces: list[str] = []
    lines = console.PrefixedLines("[tower 1] ", pieces.append)
    started = time.process_time()
    for _ in range(2000):
        lines("x" * 65536)
    assert time.process_time() - started < 5
    assert sum(piece.count("x") for piece in pieces) == 2000 * 65536
