"""Checkpoints that are damaged, forged or of another model: they are refused, and nothing has changed."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

import mirrored
from mirrored.checkpoint import manifest as manifests
from mirrored.checkpoint.codec import Malformed
from mirrored.checkpoint.folder import Disk, Folder
from mirrored.checkpoint.manifest import StoredCheckpoint, name_of
from mirrored.checkpoint.tensors import TensorFile
from tests.support.checkpoints import Stubborn, come_back, damage, json_values, manager_of, one_tower

CUTS = ("empty", "1 byte", "halves", "last byte", "longer")
CHANGES = ("first", "middle", "end", "missing", "folder", "link")


@pytest.mark.parametrize("how", [*CUTS, *CHANGES])
@pytest.mark.parametrize("file", ["manifest.json", "tensors.safetensors"])
@pytest.mark.row(45)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    folder: pathlib.Path, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, model = one_tower(folder)
    manager.step()
    expected = model.weight.clone()
    nn.init.zeros_(model.weight)
    manager.step()
    manager.wait()
    damage(folder / name_of(2) / file, how)
    nn.init.ones_(model.weight)
    with manager.resume() as restored:
        assert restored.step == 1
        assert torch.equal(model.weight, expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"{name_of(2)}/{file}" in text for text in warnings), warnings
    with pytest.raises(mirrored.CheckpointError, match=f"{name_of(2)}/{file}"):
        manager.restore(name_of(2))


@pytest.mark.row(45)
def test_nothing_whole_is_left(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.step()
    manager.wait()
    damage(folder / name_of(1) / "tensors.safetensors", "halves")
    with pytest.raises(mirrored.CheckpointError, match=r"none of the 1 checkpoints .* can be used.*it is damaged"):
        manager.restore_newest()


@pytest.mark.row(45)
def test_what_is_no_part_of_a_checkpoint_is_refused(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    (folder / name_of(0) / "more.bin").write_bytes(b"")
    with pytest.raises(mirrored.CheckpointError, match=r"holds more\.bin"):
        manager.restore(name_of(0))


@pytest.mark.row(46)
def test_a_checkpoint_of_another_model_changes_nothing(folder: pathlib.Path) -> None:
    progress = {"epoch": 1}
    first = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    manager_of(folder, {"progress": progress, "model": first}).save(wait=True)
    progress["epoch"] = 2
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    manager = manager_of(folder, {"progress": progress, "model": other})
    with pytest.raises(mirrored.CheckpointError) as caught:
        manager.restore(name_of(0))
    assert "nothing was changed: model: 2.weight is missing in the checkpoint" in str(caught.value)
    assert "0.weight has shape (5, 3) here, and (4, 3) in the checkpoint; 2 more" in str(caught.value)
    assert progress == {"epoch": 2}
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    third = manager_of(folder, {"net": first})
    with pytest.raises(mirrored.CheckpointError, match="it holds no 'net', only progress, model"):
        third.restore(name_of(0))


@pytest.mark.row(46)
def test_an_object_that_refuses_its_state_changes_nothing(folder: pathlib.Path) -> None:
    progress, stubborn, model = {"epoch": 1}, Stubborn(), nn.Linear(2, 2)
    objects = {"progress": progress, "stubborn": stubborn, "model": model}
    manager = manager_of(folder, objects)
    manager.save(wait=True)
    progress["epoch"], stubborn.asked = 2, 1
    nn.init.zeros_(model.weight)
    with pytest.raises(mirrored.CheckpointError, match="stubborn cannot load its state: KeyError: 'not mine'"):
        manager.restore(name_of(0))
    assert progress == {"epoch": 2}
    assert not model.weight.any()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "", ".", "..", ".x", "latest", "a\0b", "x" * 101, 3])
@pytest.mark.row(47)
def test_a_name_cannot_leave_the_folder(folder: pathlib.Path, name: Any) -> None:
    manager, _ = one_tower(folder)
    for call in (manager.save, manager.restore):
        with pytest.raises(ValueError, match="a checkpoint's name is"):
            call(name)
    assert sorted(p.name for p in folder.iterdir()) == [".lock"]


@pytest.mark.row(47)
def test_links_out_of_the_folder_are_not_followed(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save("elsewhere", wait=True)
    (folder / "elsewhere").rename(tmp_path / "elsewhere")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / name_of(7)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(mirrored.CheckpointError, match="symbolic link"):
        manager.restore("linked")
    assert manager.restore_newest() is None
    with pytest.raises(mirrored.CheckpointError, match=f"{name_of(7)} is not a checkpoint: move it away"):
        for _ in range(9):
            manager.step()
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["manifest.json", "tensors.safetensors"]


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (BOMBED,)


BOMBED = "/tmp/towers-test-bombed"


@pytest.mark.parametrize("file", ["manifest.json", "tensors.safetensors", "data.pkl"])
@pytest.mark.row(48)
def test_a_pickle_in_a_checkpoint_is_never_unpickled(folder: pathlib.Path, file: str) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    (folder / name_of(0) / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(mirrored.CheckpointError):
        manager.restore(name_of(0))
    assert not os.path.exists(BOMBED)


@pytest.mark.row(48)
def test_a_pickle_with_right_checksums_is_never_unpickled(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    disk, place = Disk(), folder / name_of(0)
    manifest = manifests.load((place / "manifest.json").read_bytes())
    shutil.rmtree(place)
    Folder(folder, disk).write(name_of(0), manifest, [memoryview(pickle.dumps(Bomb()))])
    with pytest.raises(
        mirrored.CheckpointError, match=r"tensors\.safetensors cannot be read: it is not a safetensors file"
    ):
        manager.restore(name_of(0))
    assert not os.path.exists(BOMBED)


@pytest.mark.row(46)
def test_the_state_of_another_optimizer_changes_nothing(folder: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(mirrored.CheckpointError, match="it is of class Adam here, and of class SGD in the checkpoint"):
        come_back(folder, torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters()))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    manager = manager_of(folder, {"model": nn.Linear(2, 2)})
    manager.save("honest", wait=True)
    return folder / "honest"


@pytest.mark.extended
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300)
def test_a_manifest_with_anything_in_it_is_refused_by_one_error(data: st.DataObject, honest: pathlib.Path) -> None:
    manifest = manifests.load((honest / "manifest.json").read_bytes())
    field = data.draw(st.sampled_from([*manifest, "objects", "own", "tensors", "files"]))
    manifest[field] = data.draw(
        json_values | st.dictionaries(st.sampled_from(["model", "w", "tensors.safetensors"]), json_values)
    )
    place = honest.parent / "changed"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(honest, place)
    try:
        (place / "manifest.json").write_bytes(manifests.dump(manifest))
    except ValueError:  # NaN is no JSON
        return
    manager = manager_of(honest.parent, {"model": nn.Linear(2, 2)})
    try:
        manager.restore("changed")
    except mirrored.CheckpointError as error:
        assert "changed" in str(error)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b"{}", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe", b'{"step": ' + b"9" * 10_000 + b"}"],
    ids=["empty", "list", "number", "object", "deep", "format", "bytes", "digits"],
)
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        manifests.load(text)


@pytest.mark.parametrize("length", [0, 7, 8, 2**40, 2**63])
def test_a_hostile_header_of_tensors_is_refused(tmp_path: pathlib.Path, length: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(length.to_bytes(8, "little")[: 7 if length == 7 else 8] + b"{}")
    with pytest.raises(Malformed):
        TensorFile(str(path), {}).read("x")


def test_opening_reads_what_was_checked(folder: pathlib.Path) -> None:
    """Files that are exchanged while a checkpoint is open change nothing of what is read."""
    manager, model = one_tower(folder)
    manager.save(wait=True)
    opened = StoredCheckpoint(folder / name_of(0))
    shutil.rmtree(folder / name_of(0))
    assert torch.equal(opened.tensors.read("model/weight"), model.weight)
    opened.close()
