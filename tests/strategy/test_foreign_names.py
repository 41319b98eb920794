"""Names of other libraries, and what is said of them; what ``import mirrored`` shows and loads."""

from __future__ import annotations

import copy

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


def test_dir_shows_the_public_names_only() -> None:
    assert dir(mirrored) == sorted([*mirrored.__all__, "__version__"])
    assert all(getattr(mirrored, name) is not None for name in mirrored.__all__)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_says_what_it_is_without_torch(option: str) -> None:
    program = "import sys; sys.modules['torch'] = None; from mirrored.cli import main; main([sys.argv[1]])"
    done = run_program(["-c", program, option])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mirrored {mirrored.__version__}" if option == "--version" else "usage: mirrored ")
