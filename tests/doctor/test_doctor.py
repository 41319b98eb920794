"""``mirrored doctor``: the real command, and real faults of a machine, an environment and a cluster."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

import mirrored.doctor
from mirrored import cli
from mirrored.doctor import Finding, Severity, examine, jobs, resources
from mirrored.doctor.findings import Check, ok
from mirrored.doctor.network import check_interfaces, check_launcher, check_tf_config, check_variables
from mirrored.doctor.resources import check_cores
from tests.support.clusters import torchrun_variables
from tests.support.jobs import ROOT
from tests.support.programs import run_program, start_function, start_program
from tests.support.waiting import HANG
from towers.system.timeouts import clock, run_with_timeout

NOWHERE = "no-such-host.invalid"


def findings(check: Check, severity: Severity, **environ: str) -> dict[str, Finding]:
    """What a check finds of one severity, by subject."""
    return {finding.subject: finding for finding in check(environ) if finding.severity is severity}


def cluster(*addresses: str, index: int) -> dict[str, str]:
    """The variable of a worker."""
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})}


def doctor(*words: str, **environ: str) -> tuple[int | None, str, str]:
    """Exit code, output and errors of ``mirrored doctor``, to which nothing seems slow, and which waits for long."""
    command = start_function(doctor_without_time, *words, env=environ)
    output, errors = command.communicate()
    return command.returncode, output, errors


def doctor_without_time(*words: str) -> int:
    clock.monotonic = lambda: 1.0  # type: ignore[method-assign]
    jobs._CPU_SECONDS = HANG
    mirrored.doctor.examine = functools.partial(examine, seconds=HANG)
    return cli.main(["doctor", *words])


@pytest.mark.extended
def test_two_towers_of_this_machine_work_together() -> None:
    code, output, errors = doctor("--json")
    report = json.loads(output)
    found = {finding["subject"]: finding for finding in report["findings"]}
    assert report["healthy"] == (code == 0) == all(f["severity"] != "problem" for f in found.values())
    assert found["CPU towers"]["severity"] == "ok"
    assert "shared memory" in found["CPU towers"]["what"]
    for subject in ("Python", "torch", "numpy", "safetensors", "TF_CONFIG", "launcher"):
        assert found[subject]["severity"] == "ok", found[subject]
    assert errors == ""


@pytest.mark.extended
def test_faults_come_last_with_their_fix_and_make_it_fail() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth77", "RANK": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    code, output, _ = doctor(**variables, **cluster(f"{NOWHERE}:4000", "127.0.0.1:4001", index=1))
    assert code == 1
    words = [line.split(maxsplit=1) for line in output.splitlines() if line and not line.startswith(" ")]
    severities = [severity for severity, _ in words if severity in ("ok", "note", "warning", "problem")]
    assert severities == sorted(severities, key=["ok", "note", "warning", "problem"].index)
    assert severities.count("problem") == 4
    last = " ".join(output[output.index("\nproblem") :].split())
    assert last.count(" fix: ") == 4
    assert "GLOO_SOCKET_IFNAME names 'eth77', which this machine does not have" in last
    assert f"1 of 2 addresses do not resolve here: {NOWHERE}:4000" in last
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in last
    assert "two towers cannot work together on this machine" in last  # although RANK says that this is a tower
    assert re.search(r"4 problems, \d+ warnings?$", last)  # a machine that is short of memory has two


ONE_OF_TWO = torchrun_variables(RANK="1", MASTER_PORT="1")
ONE_OF_THREE = cluster("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", index=2)
ELSEWHERE = {**cluster("127.0.0.1:1", "203.0.113.7:2", index=1), "GLOO_SOCKET_IFNAME": "lo"}
FAULTS = [
    # A wrong TF_CONFIG is named as training would; an address of another machine is noticed.
    (check_tf_config, Severity.PROBLEM, cluster("a:1", "b:2", index=7), "TF_CONFIG", "task.index is 7"),
    (check_tf_config, Severity.WARNING, ELSEWHERE, "TF_CONFIG", "no interface of this machine"),
    (check_tf_config, Severity.PROBLEM, ELSEWHERE, "TF_CONFIG", "leads here to this machine itself"),
    (check_tf_config, Severity.PROBLEM, ELSEWHERE, "GLOO_SOCKET_IFNAME", "cannot be reached"),
    # Gloo takes whole names, without NCCL's signs.
    (check_interfaces, Severity.PROBLEM, {"GLOO_SOCKET_IFNAME": "^lo"}, "GLOO_SOCKET_IFNAME", "names '^lo', which"),
    # Variables that contradict each other or are left over.
    (check_launcher, Severity.PROBLEM, ONE_OF_TWO | ONE_OF_THREE, "launcher", "contradict each other"),
    (check_launcher, Severity.PROBLEM, {**ONE_OF_TWO, "MASTER_ADDR": NOWHERE}, "launcher", "does not resolve"),
    (check_launcher, Severity.WARNING, {"LOCAL_RANK": "0"}, "launcher", "LOCAL_RANK set, but not"),
    (check_launcher, Severity.NOTE, {"SLURM_JOB_ID": "7"}, "launcher", "no task of srun"),
    (check_cores, Severity.WARNING, {"OMP_NUM_THREADS": "4096"}, "OMP_NUM_THREADS", ""),
    (check_cores, Severity.PROBLEM, {"OMP_NUM_THREADS": "all"}, "OMP_NUM_THREADS", ""),
]


@pytest.mark.parametrize(("check", "severity", "variables", "subject", "words"), FAULTS)
def test_a_fault_is_found(
    check: Check, severity: Severity, variables: dict[str, str], subject: str, words: str
) -> None:
    assert words in findings(check, severity, **variables)[subject].what


@pytest.fixture
def taken() -> Iterator[tuple[int, int]]:
    """A port on which another process listens, and that process."""
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    process = start_program(["-c", program], stdin=subprocess.PIPE)
    yield int(process.stdout.readline()), process.pid
    process.communicate("\n")


def test_the_chief_is_told_who_has_its_port(taken: tuple[int, int]) -> None:
    port, process = taken
    found = findings(check_tf_config, Severity.PROBLEM, **cluster(f"127.0.0.1:{port}", "127.0.0.1:2", index=0))
    assert f"in use by process {process} ({sys.executable} -c import socket" in found["chief's port"].what
    environ = torchrun_variables(MASTER_PORT=str(port))
    assert "in use" in findings(check_launcher, Severity.PROBLEM, **environ)["chief's port"].what


def test_a_chief_that_answers_or_has_not_been_started(taken: tuple[int, int]) -> None:
    port, _ = taken
    environ = cluster(f"127.0.0.1:{port}", "127.0.0.1:2", index=1)
    assert findings(check_tf_config, Severity.OK, **environ)["chief"].what.endswith("answers")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    environ = cluster(f"127.0.0.1:{port}", "127.0.0.1:2", index=1)
    assert "nothing listens" in findings(check_tf_config, Severity.WARNING, **environ)["chief"].what


@pytest.mark.extended
def test_a_chief_that_does_not_answer_is_a_problem() -> None:
    with contextlib.ExitStack() as opened:
        silent = opened.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        host, port = silent.getsockname()
        for _ in range(4):  # what comes after these gets no answer, as behind a firewall that drops
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        found = findings(check_tf_config, Severity.PROBLEM, **cluster(f"{host}:{port}", "127.0.0.1:2", index=1))
    assert "cannot be reached: timed out" in found["chief"].what


def test_nccls_variable_chooses_by_beginnings_and_whole_names() -> None:
    names = [name for _, name in socket.if_nameindex()]
    for named, chosen in (
        ("lo", "chooses lo"),
        ("=lo", "chooses lo"),
        ("=l", "leaves none"),
        ("^" + ",".join(names), "leaves none"),
        ("^=" + ",".join(name for name in names if name != "lo"), "chooses lo"),
    ):
        found = findings(check_interfaces, Severity.WARNING, NCCL_SOCKET_IFNAME=named)
        assert chosen in found["NCCL_SOCKET_IFNAME"].what


@pytest.mark.extended
def test_towers_that_cannot_be_started_are_a_problem_of_the_machine(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / ("x" * 100)  # launch makes a socket there, whose path has to be short
    folder.mkdir()
    program = "from mirrored.doctor import jobs; print(*jobs.check_cpu_towers({}))"
    result = run_program(["-c", program], env={"TMPDIR": str(folder)})
    assert "cannot work together on this machine: OSError: AF_UNIX path too long" in result.stdout, result.stderr


def test_variables_that_change_results_or_speed() -> None:
    set_to_do_nothing = {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "warn", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert [f.severity for f in check_variables(set_to_do_nothing)] == [Severity.OK]
    found = {f.subject: f.severity for f in check_variables({"NCCL_ALGO": "Tree", "CUDA_LAUNCH_BLOCKING": "1"})}
    assert found == {"NCCL_ALGO": Severity.NOTE, "CUDA_LAUNCH_BLOCKING": Severity.WARNING}


@pytest.mark.parametrize(
    ("version", "ranges", "severity"),
    [
        ("2.9", ">=2.9,<2.14", Severity.OK),
        ("2.13.1+cu126", "<2.14,>=2.9", Severity.OK),
        ("2.14.0a0", "<2.14,>=2.9", Severity.PROBLEM),
        ("2.8.9", "<2.14,>=2.9", Severity.PROBLEM),
        ("1.0.0", ">=1", Severity.OK),
        ("1.0", "==1.*", Severity.WARNING),
    ],
)
def test_versions_are_compared_with_the_packages_ranges(version: str, ranges: str, severity: Severity) -> None:
    assert resources.compare_version("torch", version, ranges, "fix").severity is severity


@pytest.mark.extended
def test_a_check_that_crashes_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    def crash(environ: object) -> Iterator[Finding]:
        yield ok("first", "well")
        os.getcwd()

    def hang(environ: object) -> Iterator[Finding]:
        run_with_timeout(HANG, lambda: os.read(pipe, 1))
        yield ok("never", "")

    pipe, writer = os.pipe()
    crashed, hung = examine({}, {"a": crash}, seconds=HANG), examine({}, {"b": hang}, seconds=0.5)
    os.close(writer)
    os.close(pipe)
    findings = [*crashed.findings, *hung.findings]
    assert [(f.severity, f.subject) for f in findings] == [
        (Severity.OK, "first"),
        (Severity.PROBLEM, "a"),
        (Severity.PROBLEM, "b"),
    ]
    assert "the check itself failed: FileNotFoundError" in findings[1].what
    assert "did not end" in findings[2].what
    assert crashed.exit_code == hung.exit_code == 1


def printed(check: str) -> list[str]:
    """A program that prints what a check finds, each with its severity, and how to run it."""
    found = f"*r.{check}(os.environ), *r.check_dev_shm(os.environ)"
    program = f"for f in [{found}]: print(f.severity.name, f.subject, f.what)"
    return [sys.executable, "-c", f"import os, mirrored.doctor.resources as r\n{program}"]


@pytest.mark.extended
def test_no_room_where_a_training_writes(tmp_path: pathlib.Path) -> None:
    script = 'mount -t tmpfs -o size=64k none "$0" && mount -t tmpfs -o size=8m none /dev/shm && cd "$0"'
    mounted = ["unshare", "--mount", "sh", "-c", f'{script} && (dd if=/dev/zero of=full; exec "$@")', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("a small file system needs unshare and the right to mount")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*mounted, *printed("check_disk")], capture_output=True, text=True, env=environ)
    assert f"PROBLEM directory nothing can be written to {tmp_path}" in result.stdout
    assert "WARNING /dev/shm 8 MB of 8 MB free" in result.stdout


@pytest.mark.extended
def test_a_containers_cpu_limit_is_seen() -> None:
    root = pathlib.Path("/sys/fs/cgroup")
    group = (root / "cpu" if (root / "cpu").is_dir() else root) / f"mirrored-doctor-{os.getpid()}"
    try:
        group.mkdir()
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("a limit needs cgroups and the right to make them")
    try:
        words = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *printed("check_cores")]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        environ.pop("OMP_NUM_THREADS")
        result = subprocess.run(words, capture_output=True, text=True, env=environ)
    finally:
        group.rmdir()
    assert "the container's limit is 0.5 CPUs" in result.stdout
    assert result.stdout.startswith("WARNING CPU")
