"""Repeats tests under conditions that change the order of events, and reports the tests that fail in any of them."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.processes import family, state_of  # noqa: E402

USAGE = """scripts/luck [--times K] [--seed N] [--all] [CONDITION …] [-- PYTEST ARGUMENT …]

  scripts/luck                                         tier one, once under each condition
  scripts/luck --all --times 3 quiet busy              all tests except those that promise seconds
  scripts/luck --times 20 busy stops -- tests/health   the tests of a folder, except those that promise seconds
"""
NOBODY = 65534  # a user without rights
DELAY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
static void wait_for_disk(void) {
    struct timespec delay = {0, rand() % 60 * 1000000};
    nanosleep(&delay, NULL);
}
int fsync(int file) { wait_for_disk(); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file); }
int fdatasync(int file) { wait_for_disk(); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file); }
int rename(const char *old, const char *new) {
    wait_for_disk();
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(old, new);
}
int unlink(const char *path) { wait_for_disk(); return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path); }
"""
"""A library that lets a disk take up to 60 ms for what makes changes last."""


class UnavailableError(Exception):
    """This machine cannot have a condition; the text is the reason."""


@dataclasses.dataclass
class Run:
    """A run of pytest, as a condition changes it before it starts.

    Attributes:
        seed: of everything in it that is random.
        folder: its own.
        command: what it runs in place of pytest's command line.
        variables: changes of its environment.
        enter: is called in its process.
        workers: how many processes run tests.
        directory: the copy of this project that is tested.
        opened: what is closed after the run.
    """

    seed: int
    folder: pathlib.Path
    command: Callable[[list[str]], list[str]] = list
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    enter: Callable[[], object] = int
    workers: int = 3
    directory: pathlib.Path = ROOT
    opened: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    watch: Callable[[subprocess.Popen[bytes], random.Random], object] | None = None


def busy(run: Run) -> None:
    """Four processes use the cores."""
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        run.opened.callback(process.wait)
        run.opened.callback(process.kill)


def half_core(run: Run) -> None:
    """All processes together have half a core."""
    quota, period = 50_000, 100_000  # microseconds
    first, second = pathlib.Path("/sys/fs/cgroup/cpu"), pathlib.Path("/sys/fs/cgroup")
    if first.is_dir():
        limits, members, parent = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}, "tasks", first
    elif (second / "cgroup.controllers").exists():
        limits, members, parent = {"cpu.max": f"{quota} {period}"}, "cgroup.procs", second
    else:
        raise UnavailableError("there are no control groups")
    group = parent / f"luck{os.getpid()}"
    try:
        group.mkdir()
        run.opened.callback(group.rmdir)
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        raise UnavailableError(f"no permission to make a control group ({error})") from None
    run.enter = lambda: (group / members).write_text(str(os.getpid()))


def stops(run: Run) -> None:
    """Processes of tests are stopped for 5 to 300 ms at random moments."""

    def watch(process: subprocess.Popen[bytes], numbers: random.Random) -> None:
        while process.poll() is None:
            if len(processes := family(process.pid)) > 1:
                chosen = numbers.choice(processes[1:])
                if state_of(chosen) != "T":  # its test has not stopped it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chosen, signal.SIGSTOP)
                        time.sleep(numbers.uniform(0.005, 0.3))
                        os.kill(chosen, signal.SIGCONT)
            time.sleep(numbers.uniform(0.0, 0.1))

    run.watch = watch


def order(run: Run) -> None:
    """Tests run in a random order."""
    run.variables["TESTS_ORDER"] = str(run.seed)


def one_worker(run: Run) -> None:
    """One process runs all tests."""
    run.workers = 0


def six_workers(run: Run) -> None:
    """Six processes run tests."""
    run.workers = 6


def slow_disk(run: Run) -> None:
    """Flushing, renaming and removing files takes up to 60 ms."""
    if shutil.which("cc") is None:
        raise UnavailableError("there is no C compiler")
    source, library = run.folder / "delay.c", run.folder / "delay.so"
    source.write_text(DELAY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    run.variables["LD_PRELOAD"] = str(library)


def nohup(run: Run) -> None:
    """SIGHUP is ignored."""
    run.command = lambda words: ["nohup", *words]


def ignored_signals(run: Run) -> None:
    """Signals are ignored that shells and schedulers ignore."""

    def enter() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)

    run.enter = enter


def blocked_signals(run: Run) -> None:
    """Signals are blocked."""
    blocked = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD}
    run.enter = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def closed_input(run: Run) -> None:
    """Standard input is closed."""
    run.command = lambda words: ["sh", "-c", 'exec "$@" <&-', "sh", *words]


def terminal(run: Run) -> None:
    """Standard input and output are a terminal; in all other conditions there is none."""
    if shutil.which("script") is None:
        raise UnavailableError("script (util-linux) is missing")
    run.command = lambda words: ["script", "--quiet", "--return", "--command", shlex.join(words), "/dev/null"]


def umask(run: Run) -> None:
    """Files are for their owner alone."""
    run.enter = lambda: os.umask(0o077)


def locale(run: Run) -> None:
    """Another locale and time zone."""
    found = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout.split()
    name = next((name for name in found if name.startswith(("tr_TR", "de_DE"))), "POSIX")
    run.variables |= {"LC_ALL": name, "LANG": name, "TZ": "NZ-12NZDT,M9.5.0,M4.1.0/3"}


def folders(run: Run) -> None:
    """The project and temporary files are in folders with spaces and long names."""
    run.directory = run.folder / "a path with spaces, ünïcode and a long name" / "mirrored"
    copy_project(run.directory)
    temporary = run.folder / "temporary files with a long name and spaces"
    temporary.mkdir()
    run.variables["TMPDIR"] = str(temporary)


def user(run: Run) -> None:
    """A user without rights."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        raise UnavailableError("needs root and setpriv")
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if subprocess.run([*as_nobody, sys.executable, "-c", ""], capture_output=True).returncode:
        raise UnavailableError(f"user {NOBODY} cannot run {sys.executable}")
    run.command = lambda words: [*as_nobody, *words]
    run.directory = run.folder / "mirrored"
    copy_project(run.directory)
    run.folder.chmod(0o755)
    for path in (run.directory, *run.directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    home = run.folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, NOBODY, NOBODY)
    run.variables |= {"HOME": str(home), "TMPDIR": str(home), "USER": "nobody", "LOGNAME": "nobody"}


def no_ipv6(run: Run) -> None:
    """The machine has no IPv6, and no network except loopback."""
    without = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    isolated = ["unshare", "--net", "sh", "-c", f'echo 1 >{without} && ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*isolated, "true"], capture_output=True).returncode:
        raise UnavailableError("needs iproute2 and permission to make network namespaces")
    run.command = lambda words: [*isolated, *words]


def quiet(run: Run) -> None:
    """Nothing else runs."""


_ALL = [
    quiet,
    busy,
    half_core,
    stops,
    order,
    one_worker,
    six_workers,
    slow_disk,
    nohup,
    ignored_signals,
    blocked_signals,
]
_ALL += [closed_input, terminal, umask, locale, folders, user, no_ipv6]
CONDITIONS = {function.__name__: function for function in _ALL}


def copy_project(to: pathlib.Path) -> None:
    """Copy what git knows, and files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


@dataclasses.dataclass
class Failure:
    """A failure of a test.

    Attributes:
        test: its name, as pytest takes it.
        error: the first line.
    """

    test: str
    error: str


def run_under(name: str, seed: int, arguments: Sequence[str], report: pathlib.Path) -> tuple[list[Failure], str]:
    """Run the tests once under a condition.

    Args:
        report: a path without suffix, for the output and the JUnit report.

    Returns:
        The failures, and pytest's last line.
    """
    with tempfile.TemporaryDirectory(prefix="luck-") as folder, contextlib.ExitStack() as opened:
        run = Run(seed, pathlib.Path(folder), opened=opened)
        CONDITIONS[name](run)
        junit = run.folder / "junit.xml" if name == "user" else report.with_suffix(".xml")
        if name == "user":
            junit.touch()
            os.chown(junit, NOBODY, NOBODY)
        command = [sys.executable, "-m", "pytest", "-n", str(run.workers), f"--junitxml={junit}"]
        command += ["--dist", "worksteal", "-p", "no:cacheprovider", *arguments]
        with report.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                run.command(command),
                cwd=run.directory,
                env={**os.environ, **run.variables},
                preexec_fn=run.enter,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            opened.callback(end_processes, process)
            if run.watch is not None:
                threading.Thread(target=run.watch, args=(process, random.Random(seed)), daemon=True).start()
            code = process.wait()
        if name == "user":
            shutil.copy(junit, report.with_suffix(".xml"))
        lines = report.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        return failures_in(report.with_suffix(".xml"), code), lines[-1] if lines else ""


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """Kill a run that has not ended, and what it has started."""
    if process.poll() is None:
        for each in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def failures_in(junit: pathlib.Path, code: int) -> list[Failure]:
    """The failures in a report; also a run that ended with another exit code than pytest has for them."""
    try:
        cases = list(xml.etree.ElementTree.parse(junit).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return [Failure("(the run)", f"no report, exit code {code}")]
    found = []
    for case in cases:
        for problem in [*case.iter("failure"), *case.iter("error")]:
            error = (problem.get("message") or problem.text or "").strip().splitlines()
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            found.append(Failure(test, error[0][:150] if error else ""))
    if code not in (0, 1) or bool(found) != (code == 1):
        found.append(Failure("(the run)", f"exit code {code}"))
    return found


def print_table(results: dict[str, list[list[Failure]]]) -> None:
    """Print how many runs of each condition failed, and by which tests."""
    print("\ncondition         runs  failed")
    for name, runs in results.items():
        print(f"{name:<16} {len(runs):>5} {sum(map(bool, runs)):>7}")
    tests: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    errors: dict[str, str] = {}
    for name, runs in results.items():
        for failure in (failure for run in runs for failure in run):
            tests[failure.test][name] += 1
            errors.setdefault(failure.test, failure.error)
    print(f"\n{len(tests)} tests failed" + (":" if tests else ""))
    for test, counts in sorted(tests.items()):
        print(f"{test}\n    {', '.join(f'{name} {count}' for name, count in counts.items())}\n    {errors[test]}")


def main(words: Sequence[str]) -> int:
    split = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="scripts/luck", usage=USAGE, description=__doc__)
    parser.add_argument("--times", type=int, default=1, metavar="K", help="runs under each condition (default 1)")
    parser.add_argument("--seed", type=int, default=int(time.time()), metavar="N", help="of orders and stops")
    parser.add_argument("--all", action="store_true", help="also the tests of scripts/test --all")
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=", ".join(CONDITIONS))
    parsed = parser.parse_args(list(words)[:split])
    for name in parsed.conditions:
        if name not in CONDITIONS:
            parser.error(f"no condition is named {name!r}; there are {', '.join(CONDITIONS)}")
    chosen = list(words)[split + 1 :]
    if "-m" not in chosen:  # what promises seconds needs a quiet machine
        chosen = ["-m", "not seconds" if parsed.all or chosen else "not seconds and not extended", *chosen]
    folder = ROOT / "results" / "luck" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    print(f"seed {parsed.seed}; outputs are in {folder.relative_to(ROOT)}", flush=True)
    results: dict[str, list[list[Failure]]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends
    try:
        for name in parsed.conditions or CONDITIONS:
            for number in range(parsed.times):
                start = time.monotonic()
                try:
                    failures, end = run_under(name, parsed.seed + number, chosen, folder / f"{name}{number}")
                except UnavailableError as error:
                    print(f"{name}: left out: {error}", flush=True)
                    break
                results.setdefault(name, []).append(failures)
                print(f"{name} {number + 1}: {end} [{time.monotonic() - start:.0f} s]", flush=True)
                for failure in failures:
                    print(f"    {failure.test}: {failure.error}", flush=True)
    finally:
        print_table(results)
    return int(any(map(any, results.values())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
