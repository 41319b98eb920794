"""A stranger's checkpoint is printed or refused: quickly, in little memory, and no word of it moves a cursor."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from mirrored import cli
from mirrored.checkpoint import manifest as manifests
from mirrored.checkpoint.manifest import name_of
from mirrored.checkpoint.reading import inspect
from tests.support.checkpoints import manager_of
from tests.support.children import in_a_child
from tests.support.hostile_checkpoints import forge, forge_manifest
from tests.support.waiting import HANG

NASTY = "a\x1b[2J\x1b]0;title\x07\r\nb\u202e\ud800\x9b31m"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """With a checkpoint "honest" and one of step 1."""
    folder = tmp_path / "checkpoints"
    manager = manager_of(folder, {"model": nn.Linear(2, 2)})
    manager.save("honest", wait=True)
    manager.step()
    manager.save(wait=True)
    return folder


def restore(folder: pathlib.Path, name: str, **more: Any) -> mirrored.CheckpointManager:
    manager = manager_of(folder, {"model": nn.Linear(2, 2), **more})
    manager.restore(name)
    return manager


@pytest.mark.extended
def test_a_reader_that_has_seen_enough(folder: pathlib.Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = [sys.executable, "-m", "mirrored", "checkpoint", "inspect", str(folder)]
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=HANG)
    assert (result.returncode, result.stderr) == (0, b"")


def test_what_cannot_be_printed_is_not(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def states(found: dict[str, Any]) -> None:
        found[NASTY] = {"text": NASTY, (NASTY,): {"deep": [{NASTY: 1}]}}
        found["model"][NASTY] = torch.ones(2)

    forge(folder, states)

    def change(manifest: dict[str, Any]) -> None:
        manifest["saved"] = NASTY
        manifest["versions"] = {NASTY: NASTY}
        manifest["files"]["tensors.safetensors"]["more"] = NASTY

    forge_manifest(folder / "forged", change)
    assert cli.main(["checkpoint", "inspect", str(folder / "forged")]) == 0
    said = capsys.readouterr().out
    assert "a?[2J?]0;title???b???31m/text" in said
    assert all(line.isprintable() for line in said.split("\n"))
    said.encode()


@pytest.mark.parametrize("where", ["file", "object", "key", "kind", "format"])
def test_an_error_says_nothing_that_cannot_be_printed(
    folder: pathlib.Path, where: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place = folder / name_of(1)
    if where == "file":
        (place / NASTY.replace("\ud800", "")).write_text("")
    elif where == "key":
        forge(folder, lambda found: found["model"].update({NASTY: torch.ones(1)}), name_of(1))
    elif where == "object":
        forge_manifest(place, lambda manifest: manifest["objects"].update({NASTY: manifest["objects"].pop("model")}))
    elif where == "kind":
        forge_manifest(place, lambda manifest: manifest["objects"].update(model={NASTY: 1}))
    else:
        forge_manifest(place, lambda manifest: manifest.update(format=NASTY))
    with pytest.raises(mirrored.CheckpointError) as caught:
        restore(folder, name_of(1))
    assert str(caught.value).isprintable()
    cli.main(["checkpoint", "inspect", str(place)])
    said = capsys.readouterr()
    assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
    assert all(line.isprintable() for message in caplog.messages for line in message.split("\n"))


ABSURD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a step of -5": ("its field 'step' is -5", lambda manifest: manifest.update(step=-5)),
    "an absurd step": ("its field 'step' is 9000", lambda manifest: manifest.update(step=9 * 10**4000)),
    "a step of 1.0": ("its field 'step' is 1.0", lambda manifest: manifest.update(step=1.0)),
    "a step of true": ("its field 'step' is True", lambda manifest: manifest.update(step=True)),
    "another step": ("it is of step 7: the folder was renamed", lambda manifest: manifest.update(step=7)),
    "no towers": ("its field 'towers' is 0", lambda manifest: manifest.update(towers=0)),
    "absurd towers": ("it is of 1000000000000 towers", lambda manifest: manifest.update(towers=10**12)),
    "more of their own": ("it is of 1 towers, but holds", lambda manifest: manifest["own"].append({})),
    "virtual towers of -4": ("its field 'virtual_towers' is -4", lambda manifest: manifest.update(virtual_towers=-4)),
    "bytes of -1": ("its field 'files' is", lambda manifest: manifest["files"]["tensors.safetensors"].update(bytes=-1)),
    "other bytes": (
        "is .* bytes long, but was written with 7: it is damaged",
        lambda manifest: manifest["files"]["tensors.safetensors"].update(bytes=7),
    ),
}


@pytest.mark.parametrize("kind", ABSURD)
def test_a_manifest_with_absurd_numbers_is_refused(folder: pathlib.Path, kind: str) -> None:
    words, change = ABSURD[kind]
    forge_manifest(folder / name_of(1), change)
    for look in (lambda: inspect(folder / name_of(1)), lambda: restore(folder, name_of(1))):
        with pytest.raises(mirrored.CheckpointError, match=words) as caught:
            look()
        assert len(str(caught.value)) < 500


IMPOSSIBLE: dict[str, tuple[str, Any]] = {
    "a size of 2^70": ("an encoded size cannot be read", {"size": [2**70]}),
    "a size of -2^70": ("an encoded size cannot be read", [{"size": [2, -(2**70)]}]),
    "a size of 4,000 digits": ("an encoded size cannot be read", {"size": [10**4000]}),
    "a size as a key": ("an encoded size cannot be read", {"items": [[{"size": [2**63]}, 1]], "kind": "dict"}),
    "a size of a text": ("an encoded size cannot be read", {"size": ["1"]}),
    "a deque of 2^70": ("an encoded deque cannot be read", {"deque": [], "maxlen": 2**70}),
    "a deque of -1": ("an encoded deque cannot be read", {"deque": [], "maxlen": -1}),
    "an int64 of 2^70": ("an encoded scalar cannot be read", {"scalar": 2**70, "dtype": "int64"}),
    "a complex of 4,000 digits": ("an encoded complex cannot be read", {"complex": [10**4000, 0]}),
    "bytes without content": ("a scalar is of kind 'V'", {"scalar": 2**31 - 1, "dtype": "V"}),
    "an object as a scalar": ("a scalar is of kind 'O'", {"scalar": 1, "dtype": "O"}),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_value_that_cannot_be_is_refused(folder: pathlib.Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, value = IMPOSSIBLE[kind]
    forge_manifest(folder / "honest", lambda manifest: manifest["objects"].update(much=value))
    assert cli.main(["checkpoint", "inspect", str(folder / "honest")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"much cannot be read: {words}" in said.err
    assert len(said.err) < 500


def test_large_numbers_that_can_be_are_shown_in_short(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [{"size": [2**63 - 1, -(2**63)]}, {"deque": [1], "maxlen": 2**63 - 1}, [9 * 10**4000]]
    forge_manifest(folder / "honest", lambda manifest: manifest["objects"].update(much={"dict": {"a": shapes}}))
    assert cli.main(["checkpoint", "inspect", str(folder / "honest")]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.startswith("much/a/")]
    assert rows == [
        ["much/a/0", "Size", f"torch.Size([{2**63 - 1}, {-(2**63)}])"],
        ["much/a/1", "deque", f"deque([1], maxlen={2**63 - 1})"],
        ["much/a/2", "list", f"[9{'0' * 55}..."],
    ]


def test_a_checkpoint_under_another_steps_name_is_not_gone_on_from(folder: pathlib.Path) -> None:
    (folder / name_of(1)).rename(folder / name_of(9))
    manager = manager_of(folder, {"model": nn.Linear(2, 2)})
    with pytest.raises(mirrored.CheckpointError, match=r"step-00000009/manifest.json .* it is of step 1"):
        manager.restore_newest()
    assert manager.steps == 0
    (folder / name_of(9)).rename(folder / "best")  # a name of its own says nothing of a step
    assert manager.restore("best").step == 1
    (folder / "best").rename(folder / "step-000000001")
    assert manager.restore_newest() is None, "no name of a step"


def many(count: int) -> dict[str, int]:
    return dict.fromkeys(map(str, range(count)), 1)


MANY = 400_000
LARGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "keys": lambda objects: objects.update(much={"dict": many(MANY)}),
    "one tensor": lambda objects: objects.update(much=[{"tensor": "model/weight"}] * MANY),
    "a long key over many": lambda objects: objects.update({"x" * 10**6: {"dict": many(10**5)}}),
    "too many": lambda objects: objects.update(much=[1] * 2**22),
    "too long": lambda objects: objects.update(much="x" * 2**26),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_manifest_takes_neither_long_nor_much_memory(folder: pathlib.Path, kind: str) -> None:
    path = folder / "honest" / "manifest.json"
    manifest = manifests.load(path.read_bytes())
    LARGE[kind](manifest["objects"])
    path.write_text(json.dumps({**manifest, "sha256": manifests._checksum(manifest)}) + "\n")
    del manifest

    def look() -> str:
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            text = inspect(folder / "honest")
            good = "and 300,0" in text or "x" * 150 in text
        except mirrored.CheckpointError as error:
            good = "keep large lists as arrays or tensors" in str(error)
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds, kilobytes = after.ru_utime - before.ru_utime, after.ru_maxrss - before.ru_maxrss
        return "right" if good and seconds < 5 and kilobytes < 250 * 2**10 else f"{good}, {seconds} s, {kilobytes} KB"

    assert in_a_child(look) == "right"
