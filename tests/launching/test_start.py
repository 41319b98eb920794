"""One script, every way to start it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys

import pytest
import torch

import mirrored
from mirrored import ClusterError, cli
from tests.support.clusters import free_port, srun_variables, tf_configs, torchrun_variables
from tests.support.jobs import ROOT
from tests.support.processes import await_ends
from tests.support.programs import Program, end_of, run_command, run_program, start_program
from tests.support.waiting import HANG, wait_until
from towers import CannotStartError
from towers.collectives import process_group
from towers.launching.job import _find_program, own_command

WORDS = ["two", "a b", "", "--flag=x y", '"$HOME"', "a$$b ${local_rank}"]

REPORT = str(ROOT / "tests" / "programs" / "report.py")
RUN = ["mirrored", "run", "--towers", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def report(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """What tests/programs/report.py printed: once, by the chief."""
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    return json.loads(line)


def test_one_device_stays_in_place() -> None:
    result = run_program([REPORT, "a b"])
    found = report(result)
    assert found["towers"] == 1
    assert result.stderr == "mirrored: 1 tower on cpu, no communication, 1 thread each, started by python\n"


def test_one_tower_of_a_launcher_communicates_with_no_other() -> None:
    result = run_command(["mirrored", "run", "--towers", "1", REPORT])
    assert report(result)["towers"] == 1
    assert result.stderr == "mirrored: 1 tower on cpu, no communication, 1 thread each, started by mirrored run\n"


@pytest.mark.parametrize(
    ("virtual_towers", "stated", "threads"),
    [
        ("None", "", "4 threads"),
        pytest.param("4", "", "1 thread", marks=pytest.mark.extended),
        pytest.param("4", "2", "2 threads", marks=pytest.mark.extended),
    ],
)
def test_threads_on_a_machine_with_eight_cores(
    tmp_path: pathlib.Path, virtual_towers: str, stated: str, threads: str
) -> None:
    """With virtual towers, whose bits depend on the number of threads, it is one unless the user sets more."""
    (tmp_path / "train.py").write_text(f"import mirrored\nmirrored.MirroredStrategy(virtual_towers={virtual_towers})\n")
    (tmp_path / "eight_cores.py").write_text(
        "import os, sys\nos.sched_getaffinity = lambda process: set(range(8))\n"
        "from mirrored import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = ["eight_cores.py", "run", "--towers", "2", "train.py"]
    result = run_program(words, cwd=str(tmp_path), env={"OMP_NUM_THREADS": stated}, code=0)
    assert f", {threads} each, started by mirrored run\n" in result.stderr


@pytest.mark.extended
def test_a_script_becomes_its_towers(tmp_path: pathlib.Path) -> None:
    """With all its flags and words, from where it was started, and whatever is called towers there."""
    (tmp_path / "towers.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "my script.py"
    script.write_text("import os\nos.chdir('/')\n" + pathlib.Path(REPORT).read_text())
    flags = ["-O", "-u", "-X", "utf8", "-Wignore::UserWarning", "-X", "faulthandler"]
    found = report(run_program([*flags, "sub/my script.py", *WORDS], cwd=str(tmp_path)))
    assert found["towers"] == 2
    assert found["arguments"] == WORDS
    assert found["optimize"] == 1
    assert found["unbuffered"] is True
    assert found["xoptions"] == {"utf8": True, "faulthandler": True}
    assert found["warnings"][-1] == "ignore::UserWarning"
    assert found["file"] == "my script.py"


@pytest.mark.extended
def test_a_module_becomes_its_towers() -> None:
    result = run_program(["-Om", "programs.report", "two", "-m", "x"], cwd=str(ROOT / "tests"))
    found = report(result)
    assert found["towers"] == 2
    assert found["name"] == "programs.report"
    assert found["arguments"] == ["two", "-m", "x"]
    assert found["optimize"] == 1
    assert result.stderr == "mirrored: 2 towers on cpu, shared memory, 1 thread each, started by python\n"


def state_of(process: int) -> str:
    """T when stopped, S or R when not."""
    return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.extended
def test_the_process_itself_becomes_the_launcher() -> None:
    """No parent is left waiting: job control and signals reach the process that was started, and with it the towers."""
    # A process group of its own, as a shell gives to each job: the kernel stops none that has no parent to wake it.
    process = start_program([REPORT, "two", "wait"], enter=os.setpgrp)
    tower = json.loads(process.stdout.readline())["pid"]
    assert f"\nPPid:\t{process.pid}\n" in pathlib.Path(f"/proc/{tower}/status").read_text()
    for number, wanted in 2 * [(signal.SIGTSTP, {"T"}), (signal.SIGCONT, {"R", "S"})]:
        process.send_signal(number)
        wait_until(lambda wanted=wanted: {state_of(process.pid), state_of(tower)} <= wanted)  # type: ignore[misc]
    process.send_signal(signal.SIGINT)
    end_of(process, -signal.SIGINT)
    await_ends(tower)


@pytest.mark.extended
@pytest.mark.parametrize(
    "words", [[REPORT, "two"], ["-m", *RUN, REPORT], ["-m", "mirrored", "cluster", REPORT]], ids=" ".join
)
@pytest.mark.parametrize(("ending", "codes"), [("fail", {1}), ("die", {-9, 128 + 9}), ("", {0})])
def test_how_towers_end_is_seen_where_sigchld_is_ignored(words: list[str], ending: str, codes: set[int]) -> None:
    """Some supervisors start programs so; the kernel then drops the exit codes of child processes."""
    result = run_program([*words, ending], enter=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert result.returncode in codes, result.stderr


@pytest.mark.extended
def test_the_terminal_shows_one_program(tmp_path: pathlib.Path) -> None:
    result = run_command(["mirrored", "run", "--towers", "3", "--log-dir", str(tmp_path), REPORT, "chatter"], code=0)
    report_line, talk = result.stdout.splitlines()
    assert json.loads(report_line)["towers"] == 3
    assert talk == "tower 0 talks"
    lines = result.stderr.splitlines()
    assert "mirrored: 3 towers on cpu, shared memory, 1 thread each, started by mirrored run" in lines
    assert "tower 0 warns" in lines
    for tower in (1, 2):
        assert f"[tower {tower}] tower {tower} warns\n" in result.stderr
        assert f"[tower {tower}] mirrored: warning: tower {tower} logs\n" in result.stderr
        assert f"tower {tower} draws" not in result.stderr
        assert f"tower {tower} talks" in (tmp_path / f"tower{tower}.out").read_text()
        assert "draws" in (tmp_path / f"tower{tower}.err").read_text()


def test_the_first_exception_comes_last_and_whole() -> None:
    result = run_command([*RUN, REPORT, "fail"], code=1)
    text = result.stderr[result.stderr.index("mirrored: tower 1 failed:\n") :]
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert 'raise ValueError("planned failure")' in text
    assert text.splitlines()[-2] == "ValueError: planned failure"
    assert text.endswith("\nmirrored: tower 1 failed before its first step: ValueError: planned failure\n")
    assert "elastic" not in result.stderr


def debug_log(*words: str) -> list[str]:
    """The lines of a job's debug log, without their times."""
    result = run_program(["-m", *RUN, REPORT, *words], env={"MIRRORED_LOG_LEVEL": "debug"})
    return [re.sub(r" [0-9]+ ms: ", ": ", line) for line in result.stderr.splitlines()]


@pytest.mark.extended
def test_changes_of_a_jobs_state_are_logged() -> None:
    lines = debug_log()
    assert any(line.startswith("mirrored: worker 0 of 1 starts 2 towers: ") for line in lines)
    for tower, name in ((0, ""), (1, "[tower 1] ")):
        for text in (
            f"mirrored: tower {tower} of 2 on cpu:{tower} joins the others at",
            f"mirrored: tower {tower} has started its heartbeats",
            f"mirrored: tower {tower} is connected by shared memory",
            "mirrored: this tower has left its process groups",
        ):
            assert any(line.startswith(name + text) for line in lines), text
    assert lines[-1] == "mirrored: worker 0 of 1 has ended with exit code 0"
    lines = debug_log("fail")
    assert any(re.search("mirrored: failure reported in .*: ValueError: planned failure$", line) for line in lines)
    assert "mirrored: tower 1 ended with 1; its report: ValueError: planned failure" in lines


@pytest.mark.extended
def test_the_exit_code_of_a_tower_is_that_of_the_job() -> None:
    result = run_command([*RUN, REPORT, "exit"], code=7)
    assert result.stderr.splitlines()[-1] == "mirrored: tower 1 ended with exit code 7 before its first step"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-c", "import mirrored; mirrored.MirroredStrategy(['cpu:0', 'cpu:1'])"], "python was started with -c"),
        (["-m", "pytest", "-q", "{inner}"], "is an installed program"),
        (["-m", "cProfile", "{inner}"], "cProfile.py is an installed program|-m cProfile, which runs"),
        (["-i", "{inner}"], "this is an interactive session"),
    ],
)
def test_only_a_users_own_script_is_started_again(words: list[str], why: str, tmp_path: pathlib.Path) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        "import mirrored\n\ndef test_it():\n    mirrored.MirroredStrategy(['cpu:0', 'cpu:1'])\n\n"
        "if __name__ == '__main__':\n    test_it()\n"
    )
    result = run_program([word.format(inner=inner) for word in words], cwd=str(tmp_path))
    text = result.stdout + result.stderr
    assert "CannotStartError: several towers are wanted" in text
    assert any(each in text for each in why.split("|"))  # Python 3.14 puts the script in __main__'s place
    for way in ("mirrored.launch(fn, towers=N)", "mirrored run --towers N script.py", "devices=['cpu:0']"):
        assert way in text


@pytest.mark.extended
def test_this_very_test_is_refused() -> None:
    with pytest.raises(CannotStartError):
        own_command()
    with pytest.raises(mirrored.CannotStartError):
        mirrored.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "a.py", "-m"], ("script", 1)),
        (["python", "-u", "-Wx", "-X", "dev", "-OO", "a.py"], ("script", 6)),
        (["python", "-um", "a"], ("module", 1)),
        (["python", "-uma"], ("module", 1)),
        (["python", "-W", "-m", "a.py"], ("script", 3)),
        (["python", "--check-hash-based-pycs", "always", "a.py"], ("script", 3)),
        (["python", "-Bc", "pass"], ("-c", -1)),
        (["python", "-"], ("a program on standard input", -1)),
        (["python"], ("no program", -1)),
    ],
)
def test_pythons_command_line(argv: list[str], expected: tuple[str, int]) -> None:
    assert _find_program(argv) == expected


TRAIN = str(ROOT / "tests" / "programs" / "train.py")


def final_loss(text: str) -> float:
    match = re.fullmatch(r"towers 2, final loss ([0-9.e-]+)\n", text)
    assert match, text
    return float(match[1])


def train() -> str:
    """What ``launch`` runs: the program, in a tower."""
    sys.argv = [TRAIN]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(TRAIN, run_name="__main__")
    return printed.getvalue()


@functools.cache
def launched_loss() -> float:
    """The loss of two towers that ``launch`` starts."""
    return final_loss(mirrored.launch(train, devices=["cpu:0", "cpu:1"])[0])


@pytest.mark.parametrize(
    "words",
    [[TRAIN, "two"], [*TORCHRUN, TRAIN], ["-m", *RUN, TRAIN], ["-m", "mirrored", "cluster", TRAIN]],
    ids=["python", "torchrun", "mirrored run", "TF_CONFIG"],
)
def test_the_same_towers_however_started_reach_the_same_loss(words: list[str]) -> None:
    assert final_loss(run_program(words, code=0).stdout) == pytest.approx(launched_loss(), rel=1e-6)


@pytest.mark.extended
def test_srun(tmp_path: pathlib.Path) -> None:
    """Two tasks with the variables that srun gives them."""
    processes = [start_program([REPORT], env=srun_variables(task)) for task in range(2)]
    outputs = [process.communicate(timeout=HANG) for process in processes]
    assert [json.loads(out)["towers"] for out, _ in outputs] == [2, 2]
    assert outputs[0][1] == "mirrored: 2 towers on cpu, shared memory, 1 thread each, started by srun\n"
    assert outputs[1][1] == ""


@pytest.mark.extended
@pytest.mark.row(15)
def test_a_second_process_with_the_same_rank_is_refused() -> None:
    port = str(free_port())

    def start(rank: int) -> Program:
        return start_program([REPORT, "wait"], env=torchrun_variables(RANK=str(rank), MASTER_PORT=port))

    first, second = start(0), start(1)
    try:
        for process in (first, second):
            assert json.loads(process.stdout.readline())["towers"] == 2
        refused = start(1)
        _, text = end_of(refused, 1)
        assert "HandshakeError: tower 1 is already taken by a process on" in text
        assert first.poll() is second.poll() is None, "the others go on"
    finally:
        for process in (first, second):
            process.kill()
            process.communicate(timeout=HANG)


@pytest.mark.parametrize("kind", ["MirroredStrategy", "CentralStorageStrategy"])
def test_a_cluster_of_several_workers_is_refused_by_strategies_that_do_not_read_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every worker would train alone, as chief."""
    monkeypatch.setenv("TF_CONFIG", tf_configs(["a:1", "b:2"])[1])
    text = f"TF_CONFIG describes 2 workers, but {kind} does not read it, .*: use mirrored.MultiWorkerMirroredStrategy"
    with pytest.raises(ClusterError, match=text):
        getattr(mirrored, kind)()
    for name, value in torchrun_variables(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(name, value)  # two towers of one worker, as mirrored run would start them in each task
    with pytest.raises(ClusterError, match=text):
        getattr(mirrored, kind)()


def test_a_cluster_of_one_worker_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_configs(["a:1"])[0])
    assert mirrored.MirroredStrategy().num_replicas_in_sync == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--towers", "0"], "--towers is 0, but must be at least 1"),
        (["--towers", "3", "--devices", "cpu:0"], "--towers is 3, but --devices names 1"),
        (["--towers", "100000"], "--towers is 100000, but this machine has "),
        (["--towers", "2", "--restarts", "1", "--min-towers", "9"], "min_towers is 9, but the job has 2 towers"),
        (["--devices", "cuda:97"], "cuda:97 asked for"),
        (["--devices", "cpu,cpu"], "cpu:0 more than once"),
        (["no_such_script.py"], "the file no_such_script.py does not exist"),
        ([], "the following arguments are required: script\n"),
    ],
)
def test_mirrored_run_refuses(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *words, *([REPORT] if words else [])])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_what_nccl_is_asked_to_say_is_not_thrown_away(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for level, said in (("", ""), ("WARN", "NCCL INFO\n")):
        monkeypatch.setenv("NCCL_DEBUG", level)
        with process_group.without_greeting():
            os.write(1, b"NCCL INFO\n")
        assert capfd.readouterr().out == said


@pytest.mark.parametrize("gpus", [1, 2])
def test_mirrored_run_has_a_gpu_for_each_tower_or_says_so(
    gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cli._devices(None, None) == cli._devices(gpus, None) == [f"cuda:{i}" for i in range(gpus)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--towers", "3", REPORT])
    assert ended.value.code == 2
    said = f"--towers is 3, but this machine has only {gpus} GPU"
    error = capsys.readouterr().err
    assert said in error
    assert error.endswith("for CPU towers pass --devices cpu:0,cpu:1,cpu:2\n")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["TFConfigClusterResolver", "LocalClusterResolver"])
def test_a_resolver_of_the_scripts_own_becomes_its_towers_once(kind: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import mirrored
strategy = mirrored.MultiWorkerMirroredStrategy(mirrored.{kind}(), devices=["cpu:0", "cpu:1"])
strategy.print(strategy.reduce("sum", 1), strategy.cluster_resolver.__class__.__name__)
"""
    )
    config = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    result = run_program([str(script)], env={"TF_CONFIG": json.dumps(config)})
    assert result.stdout == f"2 {kind}\n", result.stderr


def ignores(process: int, number: signal.Signals) -> bool:
    """Whether a process ignores this signal: the system then drops it as it is sent."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) & 1 << (number - 1))


@pytest.mark.extended
def test_nohup_is_kept(tmp_path: pathlib.Path) -> None:
    """A job whose starter ignores SIGHUP goes on after it, with several towers as with one."""
    words = [REPORT, "two", f"until={tmp_path / 'end'}"]
    process = start_program(words, before=["nohup"], session=True)
    assert json.loads(process.stdout.readline())["towers"] == 2
    # The agent ignores it again some time after its towers have started: torch's handlers came between.
    wait_until(lambda: ignores(process.pid, signal.SIGHUP))
    process.send_signal(signal.SIGHUP)
    (tmp_path / "end").touch()
    end_of(process, 0)


@pytest.mark.extended
def test_a_log_directory_that_cannot_be_made_is_said_in_a_line() -> None:
    result = run_command([*RUN, "--log-dir", "/proc/nope", REPORT], code=1)
    assert len(result.stderr.splitlines()) == 1
    assert "/proc/nope" in result.stderr


@pytest.mark.extended
def test_a_module_that_cannot_be_found_again_is_refused() -> None:
    result = run_program(["-m", "programs.report", "two", "moved"], cwd=str(ROOT / "tests"), code=1)
    assert "make the strategy before os.chdir" in result.stderr
