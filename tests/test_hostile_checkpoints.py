"""Who gives a checkpoint gives numbers: whatever they are, they are taken whole, or refused and nothing has changed."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile_checkpoints import Run, forge

import mirrored


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoints"


def refused(run: Run, words: str, name: str = "forged") -> None:
    """A checkpoint is refused with an error that says ``words``; then everything is as it was, and goes on."""
    before = run.standing()
    with pytest.raises(mirrored.CheckpointError, match=words):
        run.manager.restore(name)
    assert run.standing() == before
    run.step()
    assert run.manager.restore("honest").step == 1


def test_an_honest_checkpoint_is_taken(folder: pathlib.Path) -> None:
    run = Run(folder)
    forge(folder, lambda states: None)
    before = run.standing()
    assert run.manager.restore("forged").step == 1
    assert run.standing() != before


# -- random numbers ------------------------------------------------------------------------------------------


def torch_state(left: int, seeded: int, following: int) -> Callable[[Any], Any]:
    def change(state: torch.Tensor) -> torch.Tensor:
        data = bytearray(state.numpy().tobytes())
        struct.pack_into("<iiQ", data, 8, left, seeded, following)
        return torch.frombuffer(data, dtype=torch.uint8)

    return change


def put(index: int, value: Any) -> Callable[[Any], Any]:
    """Change an entry of a list, or an element of a tensor."""

    def change(state: Any) -> Any:
        state[index] = value
        return state

    return change


def in_tensor(index: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: put(index, change(state[index]))(state)


RANDOM_STATES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "NumPy's position beyond": ("numpy", put(2, 625)),
    "NumPy's position far beyond": ("numpy", put(2, 2**31 - 2)),
    "NumPy's position before": ("numpy", put(2, -5)),
    "NumPy's position no number": ("numpy", put(2, True)),
    "NumPy's key short": ("numpy", in_tensor(1, lambda key: key[:10])),
    "NumPy's key long": ("numpy", in_tensor(1, lambda key: key.repeat(2))),
    "NumPy's key negative": ("numpy", in_tensor(1, put(3, -1))),
    "NumPy's key too large": ("numpy", in_tensor(1, put(3, 2**32))),
    "NumPy's key fractions": ("numpy", in_tensor(1, lambda key: key.double())),
    "NumPy's other generator": ("numpy", put(0, "PCG64")),
    "NumPy's flag": ("numpy", put(3, 2)),
    "NumPy's normal number": ("numpy", put(4, "0.5")),
    "NumPy's lacks a field": ("numpy", lambda state: state[:3]),
    "NumPy's no list": ("numpy", lambda _: {"bit_generator": "MT19937"}),
    "Python's version": ("python", put(0, 2)),
    "Python's position beyond": ("python", in_tensor(1, put(624, 625))),
    "Python's position before": ("python", in_tensor(1, put(624, -1))),
    "Python's words too large": ("python", in_tensor(1, put(0, 2**40))),
    "Python's words short": ("python", in_tensor(1, lambda words: words[:600])),
    "Python's normal number": ("python", put(2, "0.5")),
    "torch's position beyond": ("torch", torch_state(624, 1, 624)),
    "torch's position askew": ("torch", torch_state(5, 1, 621)),
    "torch's position far beyond": ("torch", torch_state(5, 1, 2**40)),
    "torch's rest negative": ("torch", torch_state(-5, 1, 3)),
    "torch's never seeded": ("torch", torch_state(1, 0, 0)),
    "torch's flag": ("torch", put(5052, 7)),
    "torch's short": ("torch", lambda state: state[:100]),
    "torch's long": ("torch", lambda state: state.repeat(2)),
    "torch's fractions": ("torch", lambda state: state.double()),
    "torch's missing": ("torch", lambda _: None),
}


@pytest.mark.parametrize("stream", ["outside", "inside"])
@pytest.mark.parametrize("kind", RANDOM_STATES)
def test_a_state_at_which_no_generator_can_stand_is_refused(folder: pathlib.Path, kind: str, stream: str) -> None:
    run = Run(folder)
    field, change = RANDOM_STATES[kind]

    def states(found: dict[str, Any]) -> None:
        streams = found["mirrored.streams"][stream]
        streams[field] = change(streams[field])

    forge(folder, states)
    refused(run, "mirrored.streams cannot take it on: ")


@pytest.mark.parametrize("stream", ["outside", "inside"])
def test_a_random_state_that_is_none_at_all_is_refused(folder: pathlib.Path, stream: str) -> None:
    run = Run(folder)
    forge(folder, lambda found: found["mirrored.streams"].update({stream: 5}))
    refused(run, "mirrored.streams cannot take it on: ")
