"""Names of other libraries, and what is said of them; what ``import mirrored`` shows and loads."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest

import mirrored
from tests.support.programs import run_program


def a_dataset() -> mirrored.DistributedDataset:
    return mirrored.OneDeviceStrategy().distribute_dataset(range(6), global_batch_size=2)


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (mirrored.OneDeviceStrategy, "rank", r"strategy\.topology\.index"),
        (mirrored.OneDeviceStrategy, "extended", "the strategy has its methods itself"),
        (mirrored.OneDeviceStrategy, "experimental_run_v2", r"strategy\.run\("),
        (mirrored.OneDeviceStrategy, "world_size", r"strategy\.num_replicas_in_sync"),
        (mirrored.OneDeviceStrategy, "wait_for_everyone", r"strategy\.barrier\(\)$"),
        (mirrored.OneDeviceStrategy, "unwrap_model", "the model is not wrapped"),
        (mirrored.OneDeviceStrategy, "setup_dataloaders", r"strategy\.distribute_dataset\(loader\)"),
        (mirrored.OneDeviceStrategy, "clip_gradients", r"torch\.nn\.utils\.clip_grad_norm_\(.* after backward\(\)"),
        (a_dataset, "set_epoch", "iterating again is the next epoch"),
        (a_dataset, "sampler", "iterating again is the next epoch"),
        (lambda: mirrored, "experimental", ".*without experimental_"),
        (lambda: mirrored, "NcclAllReduce", ".*implementation='nccl'"),
        (lambda: mirrored, "HierarchicalCopyAllReduce", ".*several hosts reduce inside each host first"),
    ],
)
def test_a_name_of_others_is_answered_by_ours(owner: Callable[[], Any], name: str, instead: str) -> None:
    asked = owner()
    with pytest.raises(AttributeError, match=f"'{name}': {instead}"):
        getattr(asked, name)
    assert not hasattr(asked, name)
    with pytest.raises(AttributeError, match=r"no attribute 'something_else'$"):
        asked.something_else  # noqa: B018


def test_a_distributed_dataset_can_be_copied() -> None:
    dataset = a_dataset()
    copied = copy.copy(dataset)
    assert [batch.tolist() for batch in copied] == [batch.tolist() for batch in dataset] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("from mirrored import NcclAllReduce", "NcclAllReduce' from .*implementation='nccl'"),
        ("from mirrored import MirroredStrategy, CrossDeviceOps", "CrossDeviceOps' from .*communication=mirrored"),
        ("from mirrored import experimental", "experimental' from .* without experimental_"),
        ("from mirrored import distribute", r"distribute' from .*mirrored\.MirroredStrategy\(\)"),
    ],
)
def test_an_import_says_what_to_write_for_a_name_of_others(line: str, instead: str) -> None:
    with pytest.raises(ImportError, match=rf"^cannot import name '{instead}"):
        exec(line)


def test_a_name_of_others_is_still_missing() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'something_else' from 'mirrored'"):
        exec("from mirrored import something_else")
    for module in ("mirrored.something_else", "experimental", "other.experimental"):
        with pytest.raises(ModuleNotFoundError, match=r"^No module named '[a-z_.]+'$"):
            importlib.import_module(module)


def test_dir_shows_the_public_names_only() -> None:
    assert dir(mirrored) == sorted([*mirrored.__all__, "__version__"])
    assert all(getattr(mirrored, name) is not None for name in mirrored.__all__)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_says_what_it_is_without_torch(option: str) -> None:
    program = "import sys; sys.modules['torch'] = None; from mirrored.cli import main; main([sys.argv[1]])"
    done = run_program(["-c", program, option])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mirrored {mirrored.__version__}" if option == "--version" else "usage: mirrored ")
