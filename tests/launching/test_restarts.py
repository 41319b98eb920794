"""Jobs that start again after failures: with the bits of a run that was never disturbed, or with a reason why not."""

from __future__ import annotations

import pathlib
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

import mirrored
from tests.support import shared_memory
from tests.support.clusters import free_port, free_ports, start_agent
from tests.support.patience import PATIENT_AGENTS
from tests.support.programs import run_command, run_program, start_command
from tests.support.restarts import PROGRAM, Workers
from tests.support.waiting import HANG, wait_until
from towers.joining.store import SignedStore, serve_store
from towers.launching.job import Job
from towers.launching.restarting.meeting import _ATTEMPT, _PRESENT, FollowerRendezvous
from towers.launching.restarting.policy import choose_members, on_devices_left
from towers.launching.restarting.rendezvous import Rendezvous
from towers.launching.restarting.restarts import RestartableAttempt, _reason_against
from towers.launching.supervising.attempt import Failed
from towers.launching.supervising.failure_broadcast import FailureBroadcast
from towers.system.timeouts import Deadline

pytestmark = pytest.mark.extended

RUN = ["mirrored", "run", "--towers", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of a run without a failure."""
    output = run_command([*RUN, PROGRAM, str(tmp_path_factory.mktemp("undisturbed"))], code=0).stdout
    first, last = output.splitlines()
    assert first == "goes on after step 0"
    assert last.startswith("has ended after step 16 ")
    return last


def test_after_failures_a_job_goes_on_to_the_same_bits(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """One by an exception and one by a kill, and the first ones of a tower that nobody hears."""
    variables = {"FAIL": "4:raise:1:once,9:9:0:once"}
    logs = tmp_path / "logs"
    words = [*RUN, "--restarts", "2", "--log-dir", str(logs), PROGRAM, str(tmp_path)]
    result = run_command(words, env=variables, code=0)
    assert result.stdout.splitlines() == [*(f"goes on after step {step}" for step in (0, 2, 8)), undisturbed]
    lines = [line for line in result.stderr.splitlines() if re.match("mirrored: (?!2 towers|resuming)", line)]
    assert lines == [
        "mirrored: tower 1 failed:",
        "mirrored: tower 1 failed after step 3: ValueError: planned failure",
        "mirrored: restarting all towers (1 of 2 restarts)",
        "mirrored: tower 0 was ended by SIGKILL after step 8",
        "mirrored: restarting all towers (2 of 2 restarts)",
    ]
    names = {path.name for path in logs.iterdir()}
    assert names == {f"tower1{attempt}.{kind}" for attempt in ("", ".attempt1", ".attempt2") for kind in ("out", "err")}


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        (RUN, "start the script by python, or by mirrored run --restarts 2 --min-towers 1"),
        ([*RUN, "--restarts", "1"], ""),
        (["torchrun", "--nproc-per-node", "2"], "pass --max-restarts 2 to torchrun"),
        (["torchrun", "--nproc-per-node", "2", "--max-restarts", "1"], ""),
    ],
)
def test_a_wish_that_a_launcher_does_not_fulfil_is_a_warning(
    launcher: list[str], advice: str, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import mirrored\nmirrored.MirroredStrategy(restarts=2, min_towers=1)\n")
    errors = run_command([*launcher, str(script)], code=0).stderr
    words = "restarts=2 has no effect, because a launcher has started the towers: "
    assert errors.count(words + advice) == errors.count(words) == bool(advice)


def test_a_script_says_itself_how_often_it_starts_again(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """Also on one tower, for which there would be no agent."""
    result = run_program([PROGRAM, str(tmp_path)], env={"FAIL": "4:9:0:once", "TOWERS": "1"}, code=0)
    assert result.stdout.splitlines()[:2] == ["goes on after step 0", "goes on after step 2"]
    assert "mirrored: restarting all towers (1 of 2 restarts)" in result.stderr


STOPPED = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
print("goes on", flush=True)
"""


def test_stopped_towers_that_nobody_waits_for_are_started_again(tmp_path: pathlib.Path) -> None:
    """All of them, before they have joined each other."""
    (tmp_path / "train.py").write_text(STOPPED)
    agent = start_agent(Job(towers=2, restarts=1, collective_seconds=1.0), str(tmp_path / "train.py"))
    output, errors = agent.communicate()
    assert (agent.returncode, output) == (0, "goes on\n")
    assert errors.startswith("mirrored: towers 0 and 1: stopped (SIGSTOP) for 2 s, and killed\n")
    assert errors.endswith(
        " by SIGKILL before its strategy was made\nmirrored: restarting all towers (1 of 1 restarts)\n"
    )


GIVES_UP = {
    "the same failure": (
        ["--restarts", "5"],
        "4:raise:1",
        "mirrored: tower 1 failed after step 3: ValueError: planned failure\n"
        "mirrored: not restarted: it failed in the same way at the same step as before\n",
    ),
    "all restarts are used": (
        ["--restarts", "1"],
        "4:raise:1:once,6:9:1:once",
        "mirrored: tower 1 was ended by SIGKILL after step 5\n"
        "mirrored: not restarted: the limit of 1 restarts is reached; root cause: tower 1 failed after step 3: "
        "ValueError: planned failure\n",
    ),
}


@pytest.mark.parametrize("case", GIVES_UP)
def test_a_job_gives_up_with_a_reason(case: str, tmp_path: pathlib.Path) -> None:
    options, fails, end = GIVES_UP[case]
    result = run_command([*RUN, *options, PROGRAM, str(tmp_path)], env={"FAIL": fails})
    assert result.returncode in (1, 128 + signal.SIGKILL)
    assert result.stderr.endswith(end)


def test_an_exception_of_another_tower_may_be_the_same_failure(tmp_path: pathlib.Path) -> None:
    """All towers come to it: which of them is first is chance."""
    job = Job(2, restarts=5)
    attempt = RestartableAttempt(job, tmp_path, 0, FailureBroadcast(""), Rendezvous(job, ""))
    end = "failed before its first step: ValueError: boom"
    failures = [(Failed(f"tower {tower} {end}", end), 0) for tower in (0, 1)]
    assert _reason_against(job, attempt, failures).startswith("it failed in the same way")
    ends = [Failed(sentence, sentence) for sentence in ("tower 0 was ended", "tower 1 was ended")]
    assert _reason_against(job, attempt, [(end, 0) for end in ends]) == ""


@pytest.mark.row(70)
def test_steps_are_not_lost_unasked(tmp_path: pathlib.Path) -> None:
    words = [PROGRAM, str(tmp_path), "forgets"]
    result = run_command([*RUN, "--restarts", "2", *words], env={"FAIL": "4:raise:1"}, code=1)
    assert result.stderr.endswith(
        "mirrored: not restarted: the script restores no checkpoint, so its 3 steps would be lost. Let a "
        "CheckpointManager save and resume them; or pass --from-the-start to mirrored run\n"
    )
    words = [PROGRAM, str(tmp_path / "other"), "forgets"]
    (tmp_path / "other").mkdir()
    options = ["--restarts", "1", "--from-the-start"]
    result = run_command([*RUN, *options, *words], env={"FAIL": "4:raise:1:once"}, code=0)
    assert result.stdout.count("goes on after step 0\n") == 2


def test_a_signal_to_the_agent_is_no_failure(tmp_path: pathlib.Path) -> None:
    command = start_command([*RUN, "--restarts", "2", PROGRAM, str(tmp_path)], env={"FAIL": "4:wait:1"})
    wait_until((tmp_path / "failed4").exists)
    command.terminate()
    (tmp_path / "go").touch()
    output, errors = command.communicate()
    assert command.returncode == 75, errors
    assert output == "goes on after step 0\n"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("words", "disk", "step"), [([], {}, 2), (["memory"], {"DISK": "100"}, 3)], ids=["disk", "memory"]
)
def test_a_worker_that_is_started_anew_joins_the_others(
    words: list[str], disk: dict[str, str], step: int, index: int, undisturbed: str, tmp_path: pathlib.Path
) -> None:
    """From the checkpoint on the disk, or from the other agent's snapshot."""
    workers = Workers(tmp_path, words=words, FAIL=f"4:wait:{1 - index}", **disk)
    wait_until((tmp_path / "failed4").exists)
    workers.replace(index)
    (tmp_path / "go").touch()
    ends = workers.end()
    assert [code for *_, code in ends] == [0, 0], ends
    assert ends[0][0].splitlines()[-2:] == [f"goes on after step {step}", undisturbed]


def test_a_worker_is_started_anew_again_and_again(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """At other steps, the same words are another failure."""
    workers = Workers(tmp_path, FAIL="4:wait:0,10:wait:0")
    for step in (4, 10):
        wait_until((tmp_path / f"failed{step}").exists)
        workers.replace(1)
        (tmp_path / f"go{step}").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert output.splitlines()[1:] == ["goes on after step 2", "goes on after step 8", undisturbed]


@pytest.mark.row(71)
def test_a_second_agent_of_a_worker_is_refused(undisturbed: str, tmp_path: pathlib.Path) -> None:
    workers = Workers(tmp_path, FAIL="4:wait:1")
    wait_until((tmp_path / "failed4").exists)
    second = workers.start(1, **{PATIENT_AGENTS: "1"})
    _, errors = second.communicate()
    assert second.returncode == 1
    assert "mirrored: worker 1 is already taken by a process on" in errors
    (tmp_path / "go").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert output.splitlines() == ["goes on after step 0", undisturbed]


def test_what_the_chief_gives_up_with_is_known_on_all_workers(tmp_path: pathlib.Path) -> None:
    """The failing tower's exit code is that of its worker."""
    workers = Workers(tmp_path, FAIL="4:9:1")
    ends = workers.end()
    assert [code for *_, code in ends] == [1, 128 + signal.SIGKILL], ends
    for _, errors, _ in ends:
        assert "not restarted: it failed in the same way at the same step as before\n" in errors
        assert re.search(r"^mirrored: tower 1 on .* was ended by SIGKILL after step 3", errors, re.MULTILINE)


@pytest.mark.parametrize("restarts", [(2, 0), (0, 2)])
def test_workers_that_were_not_all_given_restarts_are_refused(restarts: tuple[int, int]) -> None:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    agents = [
        start_agent(Job(1, index, 2, addresses, restarts=each), PROGRAM, **{PATIENT_AGENTS: ""})
        for index, each in enumerate(restarts)
    ]
    text = (
        f"mirrored: worker {restarts.index(2)} was given restarts, worker {restarts.index(0)} none: start all workers"
    )
    for agent in agents:
        _, errors = agent.communicate()
        assert agent.returncode == 1
        assert errors.startswith(text)


def test_workers_ask_to_join_only_where_more_towers_could_train() -> None:
    """Or the job would start again and again: three towers do not divide four virtual ones, four do."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(4))
    job = Job(1, 2, 4, addresses, restarts=1, min_towers=2, virtual_towers=4)
    store = serve_store("127.0.0.1", int(addresses[0].partition(":")[2]), "", "token")
    signed, asked = SignedStore(store, "token"), "workers/0/towers/failures/joins"
    signed.write(_ATTEMPT, {"number": 0, "members": [0, 1]})
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(FollowerRendezvous(job, "token")._follow, Deadline(HANG))
        for _ in range(2):  # it has read the attempt before it writes the second one of these
            wait_until(lambda: (signed.read(f"{_PRESENT}2") or {"after": -1})["after"] == 0)
            store.delete_key(f"{_PRESENT}2")
        assert not store.check([asked])
        signed.write(f"{_PRESENT}3", {"after": 0, "keepalive": ""})
        wait_until(lambda: store.check([asked]))
        signed.write(_ATTEMPT, {"number": 1, "members": [0, 1, 2, 3]})
        waits.result()


def test_a_chief_that_is_told_to_end_while_workers_wait(tmp_path: pathlib.Path) -> None:
    """Nobody waits for it any longer, and it leaves nothing behind."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(3))
    variables = {PATIENT_AGENTS: "", "TMPDIR": str(tmp_path)}
    chief, worker = (
        start_agent(Job(1, index, 3, addresses, restarts=1, min_towers=1), PROGRAM, **variables) for index in range(2)
    )
    host, port = addresses[0].split(":")
    store = TCPStore(host, int(port), None, False, timedelta(seconds=HANG))
    wait_until(lambda: store.check([f"{_PRESENT}1"]))
    chief.terminate()
    assert worker.communicate() == ("", "mirrored: worker 0 received SIGTERM\n")
    assert chief.communicate() == ("", "")
    assert (chief.returncode, worker.returncode) == (-signal.SIGTERM, 1)
    assert not list(tmp_path.glob("towers-job-*"))


def test_a_worker_waits_as_long_as_the_chief_does() -> None:
    """With ``min_towers`` the chief may wait for others, and worker 1 may have come long before it."""
    port = free_port()
    job = Job(1, 1, 2, (f"127.0.0.1:{port}", "127.0.0.1:1"), restarts=1)
    store = serve_store("127.0.0.1", port, "", "token")
    follower = FollowerRendezvous(job, "token")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(follower._follow, Deadline(0.0))
        wait_until(lambda: waits.done() or store.check([f"{_PRESENT}1"]))
        SignedStore(store, "token").write(_ATTEMPT, {"number": 0, "members": [0, 1]})
        waits.result()
    assert (follower.attempt, follower.members) == (0, [0, 1])


@pytest.mark.row(72)
@pytest.mark.parametrize("options", [{"min_towers": 2}, {"restarts": 1, "min_towers": 3, "virtual_towers": 4}])
def test_min_towers_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="min_towers"):
        mirrored.MirroredStrategy(["cpu:0", "cpu:1"], **options)


@pytest.mark.row(72)
@pytest.mark.parametrize("words", [["--min-towers", "2"], ["--restarts", "1", "--min-towers", "0"], ["--restarts=-1"]])
def test_restarts_that_cannot_be(words: list[str]) -> None:
    result = run_command([*RUN, *words, PROGRAM, "nowhere"], code=2)
    assert re.search(r"mirrored: error: (min_towers|restarts)", result.stderr), result.stderr


def test_where_too_few_devices_are_left_the_job_ends() -> None:
    job = Job(2, devices=("cuda:7777", "cuda:8888"), kind="cuda", restarts=1, min_towers=2)
    with pytest.raises(mirrored.TowersError, match="0 of 2 devices are left, which are too few for min_towers=2"):
        on_devices_left(job)


@pytest.mark.parametrize(
    ("present", "options", "members"),
    [
        ([0, 2], {}, [0, 2]),
        ([0, 1, 3], {"virtual_towers": 8}, [0, 1]),
        ([0, 1], {"min_towers": 5}, []),
        ([0, 1, 3], {"min_towers": 5, "virtual_towers": 8}, []),
        ([0, 1, 2, 3], {"min_towers": 8, "virtual_towers": 8}, [0, 1, 2, 3]),
    ],
)
def test_who_goes_on(present: list[int], options: dict[str, int], members: list[int]) -> None:
    """Of four workers with two towers each."""
    assert choose_members(Job(2, 0, 4, restarts=1, **options), present) == members


def test_a_job_goes_on_with_fewer_towers_and_with_all_again(tmp_path: pathlib.Path) -> None:
    """Four towers on two hosts, two on one, and four again: the bits of two towers that nobody disturbed."""
    (tmp_path / "undisturbed").mkdir()
    alone = run_command([*RUN, PROGRAM, str(tmp_path / "undisturbed")], env={"VIRTUAL": "4"}, code=0)
    (tmp_path / "run").mkdir()
    workers = Workers(tmp_path / "run", 2, 2, VIRTUAL="4", FAIL="4:wait:0,10:told:0:once")
    wait_until((tmp_path / "run/failed4").exists)
    workers.agents[1].kill()
    workers.agents[1].communicate()
    (tmp_path / "run/go").touch()
    wait_until((tmp_path / "run/failed10").exists)
    workers.agents[1] = workers.start(1)
    (output, errors, code), (_, others, other) = workers.end()
    assert (code, other) == (0, 0), errors + others
    assert output.splitlines()[1:] == ["goes on after step 2", "goes on after step 11", alone.stdout.splitlines()[-1]]
    assert "mirrored: the job continues with 1 of 2 workers\n" in errors
    assert "mirrored: restarting all towers, with a worker that has rejoined\n" in errors


def test_towers_go_on_from_a_snapshot_in_memory(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """By an exception, while nothing is on the disk, and by a kill, while an older checkpoint is."""
    variables = {"FAIL": "4:raise:1:once,9:9:0:once", "DISK": "7"}
    words = [*RUN, "--restarts", "2", PROGRAM, str(tmp_path), "memory"]
    result = run_command(words, env=variables, code=0)
    assert result.stdout.splitlines() == [*(f"goes on after step {step}" for step in (0, 3, 8)), undisturbed]
    assert result.stderr.count("resuming from snapshot ") == 2
    assert {path.name for path in (tmp_path / "run").glob("s*")} == {"step-00000014", "step-00000016"}


def test_a_damaged_snapshot_is_skipped(undisturbed: str, tmp_path: pathlib.Path) -> None:
    words = [*RUN, "--restarts", "2", PROGRAM, str(tmp_path), "memory"]
    result = run_command(words, env={"FAIL": "6:damage:1:once"}, code=0)
    assert result.stdout.splitlines() == ["goes on after step 0", "goes on after step 4", undisturbed]
    assert re.search(
        r"tower 0: \S*/step-00000005/tensors.safetensors has another checksum than when it was written: it is damaged; "
        "it is not used",
        result.stderr,
    )


@pytest.mark.row(73)
def test_a_snapshot_of_another_job_is_refused(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """Of an agent that goes on when the chief is started with another command."""
    workers = Workers(tmp_path, words=["memory"], FAIL="4:wait:1")
    wait_until((tmp_path / "failed4").exists)
    workers.replace(0, "other")
    (tmp_path / "go").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert output.splitlines() == ["goes on after step 2", undisturbed]
    assert re.search(r"tower 1: \S*/step-00000003 is a snapshot of another job; it is not used", errors)


def test_nothing_is_left_of_an_agent_that_is_killed(tmp_path: pathlib.Path) -> None:
    command = start_command([*RUN, "--restarts", "2", PROGRAM, str(tmp_path), "memory"], env={"FAIL": "4:wait:1"})
    wait_until((tmp_path / "failed4").exists)
    files = shared_memory.files_of(command.pid, "towers-memory")
    assert sum(file.st_size > 0 for file in files) == 1
    command.kill()
    command.communicate()
    wait_until(lambda: not shared_memory.holders(files))


def test_without_memory_there_is_the_disk(undisturbed: str, tmp_path: pathlib.Path) -> None:
    """Where a worker that is started anew cannot take the other one's snapshot, nor any later one."""
    workers = Workers(tmp_path, words=["memory"], FAIL="4:wait:0")
    wait_until((tmp_path / "failed4").exists)
    workers.replace(1, "full")
    (tmp_path / "go").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert output.splitlines() == ["goes on after step 0", "goes on after step 2", undisturbed]
    assert re.search(r"tower 1: \S*/step-00000003 cannot be taken from tower 0: .* all files of the agent", errors)
    assert re.search(r"no snapshot is kept in memory: tower 1: .*/step-00000003 could not be written", errors)


@pytest.mark.row(78)
@pytest.mark.parametrize("launcher", [RUN, ["torchrun", "--nproc-per-node", "2"]], ids=["no restarts", "torchrun"])
def test_snapshots_that_would_be_lost_are_not_kept(launcher: list[str], tmp_path: pathlib.Path) -> None:
    result = run_command([*launcher, PROGRAM, str(tmp_path), "memory"], code=0)
    assert result.stderr.count("memory_every_steps is without effect, checkpoints are on the disk only") == 1
    assert "Pass restarts= to the strategy, or --restarts to mirrored run" in result.stderr
