"""What is saved comes back as it was: objects, layouts, dtypes, metrics, weights and names."""

from __future__ import annotations

import collections
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mirrored
from mirrored.checkpoint.codec import Encoder, Malformed, decode
from mirrored.checkpoint.manifest import name_of
from mirrored.checkpoint.tensors import FileLayout, TensorFile
from tests.faults.training import make_model
from tests.support.checkpoints import come_back, damage, json_values, manager_of, one_tower
from tests.support.jobs import all_raise, failures
from tests.support.programs import run_command


def test_the_script_keeps_its_own_objects(folder: pathlib.Path) -> None:
    progress, history = {"best": 0.5, (1, 2): math.nan}, [1, 2]
    manager = manager_of(folder, {"progress": progress, "history": history})
    manager.save(wait=True)
    progress["best"], progress["more"] = 0.7, 1
    history.append(3)
    assert manager.restore(name_of(0)).left == ()
    assert progress["best"] == 0.5
    assert math.isnan(progress[1, 2])
    assert history == [1, 2]


class Widths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight  # tied
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("halves", torch.randn(3).half().t())
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("counts", torch.tensor([1, 2**32 - 1], dtype=torch.uint32))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))


@pytest.mark.row(33)
def test_tied_weights_and_every_dtype_and_layout_come_back(folder: pathlib.Path) -> None:
    first, second = Widths(), Widths()
    optimizers = []
    for model in (first, second):
        optimizer = torch.optim.Adam(model.parameters())
        sum((p.float() ** 2).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizers.append(optimizer)
    saving = manager_of(folder, {"model": first, "optimizer": optimizers[0]})
    saving.save(wait=True)
    reading = manager_of(folder, {"model": second, "optimizer": optimizers[1]})
    reading.restore(name_of(0))
    assert second.layers[2].weight is second.layers[0].weight
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    moments = [o.state[m.conv.weight]["exp_avg"] for o, m in zip(optimizers, (first, second), strict=True)]
    assert torch.equal(*moments)
    assert moments[0].stride() == moments[1].stride()  # channels last, as the parameter
    names = load_file(folder / name_of(0) / "tensors.safetensors")
    assert not any("layers.2.weight" in name for name in names), "saved twice"


@pytest.mark.extended
def test_names_that_look_alike_are_kept_apart(folder: pathlib.Path) -> None:
    keys: list[Any] = ["a/b", "a", 1, "1", "x@1", "x", "%2F", "\udc80", "#1", (1, "1")]
    state: dict[Any, Any] = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    state["a"] = {"b": torch.full((2,), 9.0), "b@0": 3}
    found: dict[Any, Any] = {}
    come_back(folder, state, found)
    assert repr(found) == repr(state)


def test_metrics_go_on_counting(folder: pathlib.Path) -> None:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAUROC

    first, second = (MetricCollection({"mean": MeanMetric(), "area": BinaryAUROC()}) for _ in range(2))
    first["mean"].update(torch.tensor([1.0, 2.0]))
    first["area"].update(torch.tensor([0.2, 0.8, 0.4]), torch.tensor([0, 1, 1]))
    come_back(folder, first, second)
    second["mean"].update(torch.tensor([6.0]))
    assert float(second["mean"].compute()) == 3.0
    assert second["area"].compute() == first["area"].compute() == 1.0


class Versioned(nn.Module):
    """Reads what versions before 2 have saved in tenths."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 0) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_know_which_version_has_saved(folder: pathlib.Path) -> None:
    model = nn.Sequential(Versioned())
    come_back(folder, nn.Sequential(Versioned()), model)
    assert model[0].weight.tolist() == [1.0, 1.0]


def test_state_of_another_dtype_than_its_parameter_keeps_it(folder: pathlib.Path) -> None:
    optimizers = []
    for _ in range(2):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizers.append(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        optimizers[-1].state[parameter]["momentum_buffer"] = torch.full((3,), 1 / 3)
    come_back(folder, *optimizers)
    (state,) = optimizers[1].state.values()
    assert state["momentum_buffer"].tolist() == torch.full((3,), 1 / 3).tolist()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (collections.defaultdict(list), "progress/value is a "),
        (bytearray(b"x"), "progress/value is a "),
        ([print], "progress/value/0 is a builtin_function_or_method, which cannot be saved"),
    ],
)
def test_values_that_would_not_come_back_are_refused(folder: pathlib.Path, value: Any, words: str) -> None:
    manager = manager_of(folder, {"progress": {"value": value}})
    with pytest.raises(TypeError, match=words):
        manager.save()
    with pytest.raises(TypeError, match="'other' is a int, which has no state_dict"):
        manager_of(folder, {"other": 3})


def test_what_was_restored_does_not_lie_in_the_file(folder: pathlib.Path) -> None:
    progress = {"value": torch.arange(1000)}
    come_back(folder, progress, progress)
    path = folder / "it" / "tensors.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(progress["value"], torch.arange(1000))


def test_some_layers_are_loaded_under_other_names(folder: pathlib.Path) -> None:
    pretrained = nn.ModuleDict({"encoder": make_model(), "head": nn.Linear(3, 10)})
    manager_of(folder, {"net": pretrained}).save("pretrained", wait=True)
    model = nn.ModuleDict({"backbone": make_model(), "head": nn.Linear(3, 4), "extra": nn.Linear(2, 2)})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rename = {"encoder.": "backbone."}
    with pytest.raises(
        mirrored.CheckpointError, match=r"head\.weight has shape \(4, 3\) here, and \(10, 3\) in the file"
    ):
        mirrored.load_weights(model, folder / "pretrained", name="net", rename=rename)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = mirrored.load_weights(
        model, folder / "pretrained", name="net", rename=rename, exclude="*.4.bias", skip_misfits=True
    )
    assert report.loaded["backbone.0.weight"] == "encoder.0.weight"
    assert report.kept == ("backbone.4.bias", "head.weight", "head.bias", "extra.weight", "extra.bias")
    assert report.unused == ("encoder.4.bias", "head.weight", "head.bias")
    for key, value in model.state_dict().items():
        expected = pretrained.state_dict()[report.loaded[key]] if key in report.loaded else before[key]
        assert torch.equal(value, expected), key
    assert "8 loaded, 5 kept as they were, 3 in the file unused" in str(report)


def test_weights_of_a_plain_file(tmp_path: pathlib.Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    assert len(mirrored.load_weights(model, tmp_path / "w.safetensors").loaded) == 2
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(mirrored.CheckpointError, match="none of its 2 tensors has a name that the model has"):
        mirrored.load_weights(model, tmp_path / "w.safetensors", include="encoder.*")
    with pytest.raises(mirrored.CheckpointError, match="missing"):
        mirrored.load_weights(model, tmp_path / "nothing")


@pytest.mark.extended
def test_inspect_prints_what_is_there(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.step()
    manager.wait()
    result = run_command(["mirrored", "checkpoint", "inspect", str(folder)], code=0)
    assert result.stdout.startswith(f"{folder / name_of(1)}: step 1, saved 20")
    assert [line.split() for line in result.stdout.splitlines() if line.startswith("model/weight")] == [
        ["model/weight", "float32", "(2,", "3)", "24"]
    ]
    damage(folder / name_of(1) / "tensors.safetensors", "middle")
    result = run_command(["mirrored", "checkpoint", "inspect", str(folder / name_of(1))], code=1)
    assert result.stderr == (
        f"mirrored: {folder / name_of(1)}/tensors.safetensors has another checksum than when it was written: "
        "it is damaged\n"
    )


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()


keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())


states = st.recursive(
    scalars | st.sampled_from([torch.float16, torch.device("cuda:1"), torch.Size([2, 3])]),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["tensor", "dict", "float", "tuple"]), inner)
        | st.builds(collections.OrderedDict, st.dictionaries(st.text(), inner))
        | st.builds(collections.deque, st.lists(inner))
        | st.sets(st.integers(), max_size=1)
    ),
    max_leaves=20,
)


@hypothesis.given(states)
@hypothesis.settings(max_examples=200)
def test_state_comes_back_as_it_was(state: Any) -> None:
    encoded = json.loads(json.dumps(Encoder().encode(state, "x"), allow_nan=False))
    found = decode(encoded, lambda _: torch.zeros(0))
    assert repr(found) == repr(state)


@pytest.mark.extended
@hypothesis.given(json_values)
@hypothesis.settings(max_examples=500)
def test_what_is_no_state_is_refused_by_one_error(value: Any) -> None:
    try:
        decode(value, lambda name: torch.zeros(2, device="meta" if "x" in name else "cpu"))
    except Malformed as error:
        assert str(error)


def test_the_file_of_tensors_is_an_ordinary_one(tmp_path: pathlib.Path) -> None:
    tensors = {
        "b": torch.randn(3, 4).t(),
        "a": torch.arange(3, dtype=torch.int8),
        "c": torch.tensor(1.5),
        "e": torch.empty(0, 2),
    }
    layout = FileLayout(tensors)
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.copy_to(memory)
    for pieces in (layout.pieces(), layout.pieces(memory)):
        (tmp_path / "t").write_bytes(b"".join(pieces))
        found = load_file(tmp_path / "t")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        read = TensorFile(str(tmp_path / "t"), layout.unusual)
        assert read.read("b").stride() == tensors["b"].stride()


@pytest.mark.parametrize("trains", [True, False])
def test_data_that_is_not_saved_is_said_where_there_is_an_optimizer(
    folder: pathlib.Path, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mirrored")
    strategy = mirrored.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = nn.Linear(2, 1)
    objects: dict[str, Any] = {"model": model}
    if trains:
        objects["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    mirrored.CheckpointManager(strategy, folder, objects).save()
    said = [message for message in caplog.messages if "no distributed dataset" in message]
    assert len(said) == trains


def count_a_step_on_the_chief_alone(strategy: mirrored.Strategy, folder: pathlib.Path, before: int) -> None:
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}})
    for step in range(before + 1):
        if step < before or strategy.is_chief:
            manager.step()
        strategy.barrier()


@pytest.mark.row(81)
def test_a_step_that_the_chief_alone_counts(folder: pathlib.Path) -> None:
    """As under ``if strategy.is_chief:``, from the first step on, or in a later one alone."""
    words = r"made different calls: tower 1 strategy\.barrier\(\), tower 0 CheckpointManager\.step\(\)"
    all_raise(mirrored.DisagreementError, words, count_a_step_on_the_chief_alone, folder, 0)
    _, other = failures(count_a_step_on_the_chief_alone, folder, 1)
    assert "tower 1 strategy.barrier(), and tower 0 something else" in str(other)


def test_objects_in_dicts_and_lists_are_saved(tmp_path: pathlib.Path) -> None:
    def made(value: float) -> dict[str, Any]:
        models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
        for model in models.values():
            nn.init.constant_(model.weight, value)
        optimizers = [torch.optim.SGD(model.parameters(), lr=value) for model in models.values()]
        return {"models": models, "optimizers": optimizers, "seen": collections.Counter(x=int(value))}

    manager_of(tmp_path, made(2.0)).save("it", wait=True)
    other = made(1.0)
    manager_of(tmp_path, other).restore("it")
    assert [float(model.weight) for model in other["models"].values()] == [2.0, 2.0]
    assert [optimizer.param_groups[0]["lr"] for optimizer in other["optimizers"]] == [2.0, 2.0]
    assert other["seen"] == collections.Counter(x=2)
    assert mirrored.load_weights(other["models"]["a"], tmp_path / "it", name="models.a").loaded


def test_a_dict_of_objects_and_numbers_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="'all' has objects with a state and others"):
        manager_of(tmp_path, {"all": {"model": nn.Linear(1, 1), "epoch": 3}})


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.Counter, lambda: collections.defaultdict(int)])
def test_other_kinds_of_dicts_are_restored_in_place(kind: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    saved, restored = kind(), kind()
    saved["a"] = 3
    come_back(tmp_path, saved, restored)
    assert restored == saved
    assert type(restored) is type(saved)


def test_weights_of_the_newest_step(tmp_path: pathlib.Path) -> None:
    manager, model = one_tower(tmp_path)
    manager.step()
    manager.step()
    manager.wait()
    for source in (tmp_path, tmp_path / "latest"):
        nn.init.zeros_(model.weight)
        assert len(mirrored.load_weights(model, source).loaded) == 2
        assert model.weight.any()
