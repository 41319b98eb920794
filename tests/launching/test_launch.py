"""launch: results in order, the failing tower's traceback, and nothing left behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import pathlib
import signal
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess

import pytest
import torch

import mirrored
from tests.support.jobs import ROOT
from tests.support.processes import await_ends
from tests.support.programs import run_program, start_program
from tests.support.waiting import HANG, forever, wait_until
from towers import launch


def tower() -> int:
    return int(os.environ["RANK"])


def describe(tensor: torch.Tensor, scale: int = 1) -> tuple[int, int, list[float], str]:
    tensor += tower()  # towers get tensors by value: nobody sees this
    return tower(), os.getpid(), (tensor * scale).tolist(), os.getcwd()


def test_results_come_in_tower_order_and_by_value() -> None:
    tensor = torch.ones(2)
    results = launch(describe, (tensor,), {"scale": 10}, towers=3)
    assert [result[0] for result in results] == [0, 1, 2]
    assert len({result[1] for result in results} | {os.getpid()}) == 4
    assert [result[2] for result in results] == [[10, 10], [20, 20], [30, 30]]
    assert results[0][3] == os.getcwd()
    assert tensor.tolist() == [1, 1]


def test_the_callers_environment_is_the_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("first", "second", None):
        monkeypatch.setenv("A_VARIABLE", text) if text else monkeypatch.delenv("A_VARIABLE")
        assert launch(os.getenv, ("A_VARIABLE",)) == [text, text]


def test_towers_look_for_garbage_again() -> None:
    assert launch(gc.isenabled) == [True, True]


@contextlib.contextmanager
def start_method(name: str | None) -> Iterator[None]:
    """Inside, processes are started so."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)  # type: ignore[arg-type]
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def load_with_a_worker() -> tuple[str, list[int]]:
    squares = torch.utils.data.DataLoader(range(3), num_workers=1, collate_fn=lambda x: x[0] ** 2)
    return multiprocessing.get_start_method(), list(squares)


def test_loader_workers_start_as_the_callers_would() -> None:
    """From a fork server of each tower's own they would take seconds to come, and not take what does not pickle."""
    with start_method("fork"):
        assert launch(load_with_a_worker) == [("fork", [0, 1, 4])] * 2


def decide_on_a_start_method() -> str:
    multiprocessing.set_start_method("spawn")
    return multiprocessing.get_start_method()


def test_towers_of_a_caller_without_a_start_method_have_none_either() -> None:
    with start_method(None):
        for _ in range(2):
            assert launch(decide_on_a_start_method) == ["spawn", "spawn"]
            assert multiprocessing.get_start_method(allow_none=True) is None


def fail_on(which: int, how: str) -> int:
    if tower() == which:
        if how == "raise":
            raise KeyError("the cause")
        if how == "exit":
            sys.exit(5)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how != "raise":
        forever()
    return 1


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "KeyError: 'the cause'"), ("exit", "SystemExit: 5"), ("die", "ended by SIGSEGV")],
)
def test_the_failing_towers_traceback(how: str, words: str) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(fail_on, (1, how))
    error = caught.value
    assert str(error).startswith("tower 1 of 2 failed:\n")
    assert words in str(error)
    assert error.tower == 1
    if how == "raise":
        assert isinstance(error.__cause__, KeyError)
        assert "raise KeyError" in str(error)


def lose_a_peer() -> None:
    strategy = mirrored.MirroredStrategy()
    if tower() == 1:
        raise ValueError("the first cause")
    strategy.reduce("sum", torch.ones(100_000))


def test_the_first_cause_is_told_not_its_consequences() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(lose_a_peer, towers=3)
    assert caught.value.tower == 1
    assert str(caught.value).endswith("ValueError: the first cause")
    others = [failure for failure in caught.value.failures if failure.tower != 1]
    assert all(failure.consequence for failure in others)


@pytest.mark.extended
def test_a_job_has_a_time_limit_or_none() -> None:
    with pytest.raises(mirrored.TowerFailedError, match=r"not done after 1 s \(not done: towers 0, 1\)"):
        launch(forever, timeout=1)
    assert launch(tower, timeout=float("inf")) == [0, 1]


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be copied")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def return_stubborn() -> object:
    return lambda: 1


def test_what_does_not_pickle_is_said() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="Stubborn: cannot be copied") as caught:
        launch(raise_stubborn)
    assert caught.value.__cause__ is None
    with pytest.raises(mirrored.TowerFailedError, match="pickle"):
        launch(return_stubborn)
    with pytest.raises(TypeError, match="define the function at the top level"):
        launch(lambda: 1)


def print_all() -> None:
    print(f"tower {tower()} talks")
    print(f"tower {tower()} warns", file=sys.stderr)


def test_output_goes_where_the_caller_looks(capsys: pytest.CaptureFixture[str]) -> None:
    launch(print_all)
    out, err = capsys.readouterr()
    assert out == "tower 0 talks\n"
    assert sorted(err.splitlines()) == ["[tower 1] tower 1 warns", "tower 0 warns"]


def nest() -> None:
    launch(tower)


def test_wrong_arguments() -> None:
    for options, words in (
        ({"towers": 0}, "towers must be a positive whole number, not 0"),
        ({"towers": 2, "devices": ["cpu:0"]}, "towers is 2, but devices names 1: cpu:0"),
        ({"devices": ["cpu", "cpu"]}, "more than once"),
    ):
        with pytest.raises(ValueError, match=words):
            launch(tower, **options)
    with pytest.raises(mirrored.TowerFailedError, match="CannotStartError: launch was called inside a tower"):
        launch(nest)
    assert launch(tower, devices=["cpu:0", "cpu:1", "cpu:2"]) == [0, 1, 2]


def beside_a_group_of_the_users(url: str) -> tuple[int, list[int]]:
    import torch.distributed as dist

    dist.init_process_group("gloo", url, rank=tower(), world_size=2)
    strategy = mirrored.MirroredStrategy()
    total = torch.tensor([tower()])
    dist.all_reduce(total)
    heartbeat = strategy.communicator.health.heartbeat
    wait_until(lambda: [peer.lives for peer in heartbeat.query([0, 1], stacks=False)] == [True, True])
    return strategy.reduce("sum", tower() + 1), total.tolist()


def test_a_process_group_of_the_users_stays(tmp_path: pathlib.Path) -> None:
    """Towers see each other's heartbeats, however it was formed."""
    for url in ("env://", f"file://{tmp_path}/group"):
        assert launch(beside_a_group_of_the_users, (url,), devices=["cpu:0", "cpu:1"]) == [(3, [1])] * 2


def without_variables() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    mirrored.MirroredStrategy()


def test_peers_that_no_launcher_names_are_refused() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="initialised with 2 ranks, but RANK, WORLD_SIZE.* are not set"):
        launch(without_variables, devices=["cpu:0", "cpu:1"])


SCRIPT = """
    import os, sys, time
    from towers import launch

    def work(folder):
        open(os.path.join(folder, os.environ["RANK"]), "w").write(str(os.getpid()))
        time.sleep(100_000)

    if __name__ == "__main__":
        launch(work, (sys.argv[1],))
"""


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running(number: int, tmp_path: pathlib.Path) -> None:
    """SIGTERM is sent in tests/health/test_signals.py."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = start_program([str(script), str(tmp_path)], session=True)
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    towers = [int(file.read_text()) for file in files]
    process.send_signal(number)
    process.wait()
    await_ends(*towers)


NOTEBOOK = """
    import torch, mirrored

    offset = 10

    def work(x):
        strategy = mirrored.MirroredStrategy()
        return strategy.reduce("sum", x + offset)

    print(mirrored.launch(work, (1,), devices=["cpu:0", "cpu:1"]))
"""


@pytest.mark.extended
@pytest.mark.parametrize("words", [["-c", textwrap.dedent(NOTEBOOK)], ["-"]], ids=["-c", "standard input"])
def test_functions_from_a_notebook_cell(words: list[str]) -> None:
    """Such a program has a __main__ without a file, as a notebook kernel has."""
    result = run_program(words, cwd=str(ROOT), stdin=textwrap.dedent(NOTEBOOK))
    assert result.stdout == "[22, 22]\n", result.stderr


def leave_a_child_behind(path: str) -> None:
    if tower() == 1:
        if (child := os.fork()) == 0:
            forever()
        pathlib.Path(path).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    forever()


@pytest.mark.extended
def test_a_dead_tower_is_seen_while_its_child_lives(tmp_path: pathlib.Path) -> None:
    with pytest.raises(mirrored.TowerFailedError, match="tower 1 ended by SIGKILL"):
        launch(leave_a_child_behind, (str(tmp_path / "child"),))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def close_everything_and_end(asked: pathlib.Path) -> None:
    os.closerange(3, 1024)
    wait_until(asked.exists)
    threading.Event().wait(2.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.extended
def test_the_exit_code_is_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower lives until its launcher waits for its end, and two seconds more."""
    join = ForkServerProcess.join

    def asking(process: ForkServerProcess, timeout: float | None = None) -> None:
        (tmp_path / "asked").touch()
        join(process, timeout)

    monkeypatch.setattr(ForkServerProcess, "join", asking)
    with pytest.raises(mirrored.TowerFailedError, match="tower 0 ended by SIGKILL"):
        launch(close_everything_and_end, (tmp_path / "asked",), towers=1)


def end_by_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def test_signals_without_a_name() -> None:
    with pytest.raises(mirrored.TowerFailedError, match=f"ended by signal {signal.SIGRTMIN + 6}"):
        launch(end_by_a_signal_without_a_name)


def write_later(path: str) -> None:
    """As a logger or a checkpoint in the background does."""

    def write() -> None:
        threading.main_thread().join()
        pathlib.Path(f"{path}{tower()}").write_text("done")

    threading.Thread(target=write).start()


def test_threads_may_end_what_they_do(tmp_path: pathlib.Path) -> None:
    launch(write_later, (f"{tmp_path}/",))
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["done", "done"]


def register(path: str) -> None:
    atexit.register(lambda: pathlib.Path(f"{path}{tower()}").write_text("done"))


def test_exit_handlers_run(tmp_path: pathlib.Path) -> None:
    launch(register, (f"{tmp_path}/",))
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["done", "done"]


def finalize_own(path: str) -> tuple[bool, int]:
    """Returns whether the fork server has registered finalizers, and how many of them this tower will run."""
    inherited = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize(atexit, pathlib.Path(f"{path}{tower()}").write_text, "done")
    return bool(inherited), sum(each.atexit for each in inherited)


def test_a_tower_runs_its_finalizers_and_not_those_of_the_fork_server(tmp_path: pathlib.Path) -> None:
    assert launch(finalize_own, (f"{tmp_path}/",)) == [(True, 0), (True, 0)]
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["done", "done"]


UNCLOSED: list[io.TextIOWrapper] = []


def write_without_closing(path: str) -> None:
    UNCLOSED.append(open(f"{path}{tower()}", "w"))  # noqa: SIM115
    UNCLOSED[0].write("done")
    raise ValueError("planned failure")


def test_a_failing_tower_keeps_the_data_of_files_that_it_has_not_closed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(write_without_closing, (f"{tmp_path}/",))
    assert (tmp_path / f"{caught.value.tower}").read_text() == "done"


def talk() -> int:
    for _ in range(3000):
        print("x" * 100)
    return tower()


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads this any more")


def test_output_that_nobody_reads_stops_no_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    assert launch(talk, timeout=HANG) == [0, 1]


@pytest.mark.extended
def test_a_fork_server_that_has_used_cuda_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    program = """
        import os
        from multiprocessing import forkserver
        import mirrored

        forkserver.set_forkserver_preload(["uses_cuda"])
        forkserver.ensure_running()
        print(mirrored.launch(os.getenv, ("RANK",), devices=["cpu:0"]))
        mirrored.launch(os.getenv, ("RANK",), devices=["cuda:0"])
    """
    result = run_program(["-c", textwrap.dedent(program)], env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert result.stdout == "['0']\n"
    assert "CannotStartError: the fork server that starts towers has used CUDA" in result.stderr
