"""What these tests share."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoints"
