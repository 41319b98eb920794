"""Switches off one detector of faults at a time, and shows the end-to-end test that then fails.

Each row is a detector, a fault, and an end-to-end test of that fault. The test runs twice in a copy of the repository:
unchanged, where it must pass, and without the detector, where it must fail. The guard of the tests ends a test that
hangs, with all its processes, and counts it as failed. ``--all`` runs all tests of ``tests/health``,
``tests/launching``, ``tests/attached``, ``tests/collectives`` and ``tests/strategy`` instead, some ten minutes for each
row.

Exit code 1: a test passes without its detector, or fails with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = [f"tests/{name}" for name in ("health", "launching", "attached", "collectives", "strategy")]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A detector of a fault, and how it is switched off.

    Attributes:
        name: its name in the table.
        fault: the fault that it detects.
        module: its file.
        old, new: a text that occurs once in the module, and its replacement.
        test: a test that fails without it.
    """

    name: str
    fault: str
    module: str
    old: str
    new: str
    test: str


MECHANISMS = [
    Mechanism(
        "index of a process",
        "two processes have the same index",
        "towers/joining/participant.py",
        '        if stored["nonce"] != self._nonce:\n            other =',
        "        if False:\n            other =",
        "tests/launching/test_start.py::test_a_second_process_with_the_same_rank_is_refused",
    ),
    Mechanism(
        "token of a job",
        "a process finds the store of another job",
        "towers/joining/store.py",
        '    if not hmac.compare_digest(signature.encode(errors="replace"), _hmac(token, key, text).encode()):',
        "    if False:",
        "tests/joining/test_handshake.py::test_a_tower_with_another_token_is_refused_and_the_job_goes_on",
    ),
    Mechanism(
        "number of the chief",
        "a message of an earlier start stands for a process that is not there",
        "towers/joining/participant.py",
        '            if message is not None and message.get("to", self._nonce) == self._nonce:',
        "            if message is not None:",
        "tests/joining/test_attacks.py::test_a_replayed_message_does_not_stand_for_a_tower_that_is_not_there",
    ),
    Mechanism(
        "comparison of towers",
        "towers have different options or kinds of devices, or the same GPU",
        "towers/collectives/connecting.py",
        '    if message["options"] != reference["options"]:',
        "    if False:",
        "tests/strategy/test_bad_models.py::test_options_are_compared_where_a_process_group_exists_already",
    ),
    Mechanism(
        "process of a peer",
        "a tower is killed, and its launcher leaves the others alone (srun)",
        "towers/collectives/shared_memory/barrier.py",
        "        ended = {self._watched[descriptor]",
        "        return []\n        ended = {self._watched[descriptor]",
        "tests/health/test_failing_towers.py::"
        "test_a_killed_tower_is_reported_by_the_others_if_its_launcher_leaves_them_alone",
    ),
    Mechanism(
        "parent watchdog",
        "the process that started the towers is killed",
        "towers/health/failure.py",
        '    threading.Thread(target=watch, name="towers-parent-watchdog", daemon=True).start()',
        "    pass",
        "tests/health/test_seconds.py::test_towers_end_soon_after_the_death_of_their_torchrun",
    ),
    Mechanism(
        "keepalive connection",
        "the agent of another worker is killed before its towers have met",
        "towers/launching/restarting/keepalive.py",
        "            if end:\n                self._lost",
        "            if False:\n                self._lost",
        "tests/launching/test_keepalive.py::test_an_agent_that_ends_before_its_towers_have_met_the_others",
    ),
    Mechanism(
        "stopped towers",
        "all towers of a job are stopped (SIGSTOP)",
        "towers/launching/restarting/restarts.py",
        "        return state is not None and state.si_code == os.CLD_STOPPED",
        "        return False",
        "tests/launching/test_restarts.py::test_stopped_towers_that_nobody_waits_for_are_started_again",
    ),
    Mechanism(
        "failure broadcast",
        "a tower of another worker fails",
        "towers/launching/supervising/failure_broadcast.py",
        "            self._ask(lambda store: (store.publish(_FAILURE, message), store.add(_NEWS, 1)))",
        "            pass",
        "tests/health/test_failing_towers.py::test_every_worker_names_the_tower_that_failed_first",
    ),
    Mechanism(
        "deadlock search",
        "towers wait for each other in a cycle",
        "towers/health/heartbeat.py",
        "        cycle = deadlock.find_cycle(self._beats, beats)",
        "        cycle = None",
        "tests/health/test_deadlock.py::test_towers_that_wait_for_each_other_end_at_once",
    ),
    Mechanism(
        "deadline of a step",
        "a step never ends, and no other tower waits for it",
        "towers/health/heartbeat.py",
        '    threading.Thread(target=_watch_steps, args=arguments, name="towers-step-deadline", daemon=True).start()',
        "    pass",
        "tests/health/test_waiting_towers.py::test_a_step_has_a_deadline",
    ),
    Mechanism(
        "stack of a slow tower",
        "a tower is slow, and the message of the waiting one does not show where",
        "towers/health/timeout_messages.py",
        "    if health.heartbeat is None:\n        return collective_timeout(",
        "    if True:\n        return collective_timeout(",
        "tests/health/test_waiting_towers.py::test_the_error_of_who_waits_shows_what_the_slow_tower_does",
    ),
    Mechanism(
        "end after a caught error",
        "a script catches the error of towers that are out of step, and continues",
        "towers/health/failure.py",
        "    if noted is not None and here == (noted.process, noted.thread) and sys.exc_info()[1] is None:",
        "    if False:",
        "tests/health/test_caught_errors.py::test_errors_that_a_script_catches",
    ),
    Mechanism(
        "announcement",
        "towers make different calls at the same time",
        "towers/collectives/agreement.py",
        '        if other["call"] != headers[0]["call"]:',
        "        if False:",
        "tests/checkpoint/test_contents.py::test_a_step_that_the_chief_alone_counts",
    ),
    Mechanism(
        "tag of a barrier",
        "towers that share memory make different calls that are not announced",
        "towers/collectives/shared_memory/barrier.py",
        "        tags = self.tags.differing()\n",
        "        tags: list[str | None] = []\n",
        "tests/sharding",
    ),
    Mechanism(
        "pairing of backwards",
        "a tower leaves out a backward",
        "towers/gradients/flags.py",
        "    return not any(map(operator.mul, counts[::2], counts[1::2]))",
        "    return True",
        "tests/gradients/test_skipped_backwards.py",
    ),
    Mechanism(
        "guard of the optimizer",
        "an optimizer steps on gradients that were not averaged",
        "mirrored/strategy/guard.py",
        "        if averager.averaged_since(stepped, parameters):",
        "        if True:",
        "tests/strategy/test_unaveraged_gradients.py::test_a_step_on_gradients_that_were_not_averaged_is_refused",
    ),
    Mechanism(
        "guard of early backwards",
        "a backward before the first run",
        "mirrored/strategy/guard.py",
        "            for parameter in self._recorder.untaken()",
        "            for parameter in ()",
        "tests/strategy/test_unaveraged_gradients.py::test_a_backward_before_the_first_run_is_refused",
    ),
    Mechanism(
        "guard of Keras layers",
        "a layer of Keras is built outside of the scope",
        "mirrored/strategy/guard.py",
        "        if parameter.requires_grad and not _is_recorded(parameter):",
        "        if False:",
        "tests/strategy/test_unaveraged_gradients.py::test_keras_layers_that_nobody_averages_are_refused",
    ),
    Mechanism(
        "mirror check",
        "one tower changes a parameter",
        "mirrored/strategy/engine.py",
        "        events.begin_run.append(lambda fn: check.begin_run())",
        "        pass",
        "tests/attached/test_mirror_check.py",
    ),
    Mechanism(
        "last check",
        "towers differ when they end, before the next mirror check",
        "mirrored/attached/mirror_check.py",
        '        launched = os.environ.get(STARTED_BY) == "launch"',
        "        launched = True",
        "tests/attached/test_last_check.py",
    ),
    Mechanism(
        "comparison of data",
        "towers load different data",
        "mirrored/data/contents.py",
        "def tower_that_differs(towers: Sequence[Any]) -> int | None:",
        "def tower_that_differs(towers: Sequence[Any]) -> int | None:\n    return None",
        "tests/data/test_contents.py::test_different_data_are_an_error",
    ),
]


def outcome(folder: pathlib.Path, tests: list[str]) -> tuple[int, float]:
    """Pytest's exit code for the tests in a copy of the repository (1: some fail), and the seconds that they took."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    variables = {**os.environ, "PYTHONPATH": str(folder), "TESTS_LONGEST": "1"}  # hanging tests may be busy
    started = time.monotonic()
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False)
    return ended.returncode, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="detectors whose names contain this")
    parser.add_argument("--all", action="store_true", help="run all tests of some folders for each detector")
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    not_missed = 0
    with tempfile.TemporaryDirectory(prefix="mirrored-ablate-") as temporary:
        folder = pathlib.Path(temporary)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        for mechanism in MECHANISMS:
            if arguments.only not in mechanism.name:
                continue
            tests = FOLDERS if arguments.all else [mechanism.test]
            module = folder / mechanism.module
            text = module.read_text()
            if text.count(mechanism.old) != 1:
                raise ValueError(f"{mechanism.module}: {mechanism.old!r} occurs {text.count(mechanism.old)} times")
            code, seconds = (0, 0.0) if arguments.all else outcome(folder, tests)
            module.write_text(text.replace(mechanism.old, mechanism.new))
            without, longer = outcome(folder, tests)
            module.write_text(text)
            good = (code, without) == (0, 1)
            not_missed += not good
            print(
                f"{'missed' if good else 'NOT MISSED':11} {mechanism.name:26} with it: {code} after {seconds:3.0f} s, "
                f"without: {without} after {longer:3.0f} s  {mechanism.fault}",
                flush=True,
            )
    return 1 if not_missed else 0


if __name__ == "__main__":
    sys.exit(main())
