"""Names of other libraries, and what is said of them; what ``import mirrored`` shows and loads."""

from __future__ import annotations

import copy
import importlib

import pytest

import mirrored
from tests.support.jobs import run_program


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("rank", r"strategy\.topology\.index"),
        ("extended", "the strategy has its methods itself"),
        ("experimental_run_v2", r"strategy\.run\("),
        ("world_size", r"strategy\.num_replicas_in_sync"),
        ("wait_for_everyone", r"strategy\.barrier\(\)$"),
        ("unwrap_model", "the model is not wrapped"),
    ],
)
def test_a_strategy_says_what_to_write_for_a_name_of_others(name: str, instead: str) -> None:
    strategy = mirrored.OneDeviceStrategy()
    with pytest.raises(AttributeError, match=f"'{name}': {instead}"):
        getattr(strategy, name)
    assert not hasattr(strategy, name)
    with pytest.raises(AttributeError, match=r"no attribute 'something_else'$"):
        strategy.something_else  # type: ignore[attr-defined]  # noqa: B018


def test_a_distributed_dataset_says_what_to_write_for_set_epoch_and_sampler() -> None:
    dataset = mirrored.OneDeviceStrategy().distribute_dataset(range(6), global_batch_size=2)
    for name in ("set_epoch", "sampler"):
        with pytest.raises(AttributeError, match=f"'{name}': iterating again is the next epoch"):
            getattr(dataset, name)
    copied = copy.copy(dataset)
    assert [batch.tolist() for batch in copied] == [batch.tolist() for batch in dataset] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("experimental", "without experimental_"),
        ("NcclAllReduce", "implementation='nccl'"),
        ("HierarchicalCopyAllReduce", "several hosts reduce inside each host first"),
    ],
)
def test_the_package_says_what_to_write_for_a_name_of_others(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'mirrored' has no attribute '{name}': .*{instead}"):
        getattr(mirrored, name)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("from mirrored import NcclAllReduce", "NcclAllReduce: .*implementation='nccl'"),
        ("from mirrored import MirroredStrategy, CrossDeviceOps", "CrossDeviceOps: communication=mirrored"),
        ("from mirrored import experimental", "experimental: .* without experimental_"),
        ("from mirrored.experimental import CollectiveHints", "experimental: .* without experimental_"),
        ("import mirrored.experimental", "experimental: .* without experimental_"),
        ("import mirrored.distribute as distribute", r"distribute: .*mirrored\.MirroredStrategy\(\)"),
    ],
)
def test_an_import_says_what_to_write_for_a_name_of_others(line: str, instead: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^cannot import mirrored\.{instead}"):
        exec(line)


def test_a_name_of_others_is_still_missing() -> None:
    assert not hasattr(mirrored, "NcclAllReduce")
    assert getattr(mirrored, "NcclAllReduce", None) is None
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
