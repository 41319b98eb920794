"""The Ray cluster in which servers and workers run.

[Note: tasks are nodes] If ``TF_CONFIG`` has a job ``ps``, every task runs the same script. The chief is the driver of a
Ray cluster, which listens at the chief's address. The tasks ``worker`` and ``ps`` become nodes of this cluster in the
strategy's constructor, and run nothing more of the script. They end when nothing listens at the chief's address.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from typing import Any, NoReturn

import ray

from mirrored.cluster.resolver import ClusterError, ClusterResolver
from towers.errors import StartupError
from towers.system import machine
from towers.system.messages import get_logger, split_address
from towers.system.timeouts import Deadline, clock, wait_until
from towers.topology import JOB_TOKEN

log = get_logger("mirrored")

_JOBS = ("worker", "ps")

_HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000}
"""A node that does not answer five times in a row counts as lost. (Ray's defaults are 3 and 10 seconds.)"""


_TOO_SLOW = "timed out during startup"
"""Ray's words for a node that did not start within 30 seconds, which Ray has no option for."""


class Cluster:
    """A Ray cluster. This process is its driver.

    Args:
        resolver: the tasks that are its nodes. Without tasks, it is the cluster of this process or of ``RAY_ADDRESS``;
            otherwise, a cluster on this machine, which is started here and ends with the script.
        processes: the number of processes that share this machine, if workers and servers are started on it.
        timeout: seconds in which all tasks must join.

    Attributes:
        origin: the source of the cluster, for the log.

    Raises:
        ClusterError: ``chief``, ``worker`` or ``ps`` is missing.
        StartupError: not all tasks joined, or they do not share a secret.
        SystemExit: this process was a task that became a node, and the chief has ended.
    """

    def __init__(self, resolver: ClusterResolver, processes: int, timeout: float) -> None:
        tasks = resolver.cluster_spec()
        if missing := [job for job in ("chief", *_JOBS) if tasks and not tasks.get(job)]:
            raise ClusterError(
                f"{resolver.origin}: cluster has no {missing[0]!r} task, but parameter servers need a 'chief', which "
                "runs the script, and one 'worker' and one 'ps' at least. Without 'ps' take MultiWorkerMirroredStrategy"
            )
        self._addresses = {f"{job}:{i}": address for job in _JOBS for i, address in enumerate(tasks.get(job, []))}
        self.origin = "this script"
        if ray.is_initialized():
            self.origin = "the Ray cluster of this process"
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would limit each actor to one thread.
        os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(1 if tasks else processes)))
        if tasks:
            _share_secret(resolver)
            (chief,) = tasks["chief"]
            if resolver.task_type != "chief":
                own = f"{resolver.task_type}:{resolver.task_id}"
                _become_node(own, self._addresses[own], chief, timeout)
            self.origin = f"python with {resolver.origin}"
            os.environ["RAY_GCS_SERVER_PORT"] = str(split_address(chief)[1])
            _start_ray(_node_ip_address=_ip_of(chief), _system_config=_HEALTH)
            if not wait_until(lambda: not self._missing(), timeout, pause=0.2):
                raise StartupError(
                    f"{', '.join(self._missing())} did not join within {timeout:.0f} s: start the script there, "
                    "with the same TF_CONFIG except for the task, or look for the reason why it ended there"
                )
        elif "RAY_ADDRESS" in os.environ:
            self.origin = f"the Ray cluster at {os.environ['RAY_ADDRESS']}"
            ray.init(logging_level=logging.ERROR)
        else:
            if "RAY_AUTH_MODE" not in os.environ:  # otherwise, it was set before, and the token of that time is kept
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray requires it if it is set
            _start_ray()

    def _missing(self) -> list[str]:
        """Returns the tasks that have not become nodes yet."""
        there = ray.cluster_resources()
        return [f"{task} ({address})" for task, address in self._addresses.items() if task not in there]

    def start(self, kind: type, task: str, *arguments: Any) -> Any:
        """Starts an actor and returns its handle.

        Args:
            task: the name of a task, such as "ps:0". If the cluster has this task, the actor waits for it and runs
                there.
        """
        place: Any = {"resources": {task: 0.001}} if self._addresses else {"scheduling_strategy": "SPREAD"}
        return ray.remote(kind).options(num_cpus=0, max_restarts=0, **place).remote(*arguments)


def _start_ray(**options: Any) -> None:
    ray.init("local", include_dashboard=False, logging_level=logging.ERROR, **options)


def _share_secret(resolver: ClusterResolver) -> None:
    """Makes Ray require the job's secret from all nodes."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    if not (token := os.environ.get(JOB_TOKEN)):
        raise StartupError(
            f"the tasks of {resolver.origin} run code that they receive, so they must share a secret: set "
            f"{JOB_TOKEN} to the same value on all of them (openssl rand -hex 32). If no other process can reach "
            "them, RAY_AUTH_MODE=disabled removes this requirement"
        )
    os.environ["RAY_AUTH_TOKEN"] = hashlib.sha256(token.encode()).hexdigest()


def _become_node(task: str, address: str, chief: str, timeout: float) -> NoReturn:
    """Makes this process a node until the chief ends; see [Note: tasks are nodes]."""
    if not wait_until(lambda: machine.answers(*split_address(chief)), timeout, pause=0.5):
        raise StartupError(f"the chief did not connect to {chief} within {timeout:.0f} s: {task} at {address} ends")
    deadline = Deadline(timeout)
    while (failure := _serve(task, address, chief)) is not None:
        if _TOO_SLOW not in failure or deadline.has_passed():
            raise StartupError(f"{task} at {address} has ended as a node of the Ray cluster at {chief}:\n{failure}")
        log.warning("the node of %s did not start in the time that Ray gives it, and is started again", task)
    log.info("nothing listens at %s any more: %s ends", chief, task)
    sys.exit(0)


def _serve(task: str, address: str, chief: str) -> str | None:
    """Is a node until it ends, and returns Ray's output, or until nothing listens at the chief's address (None)."""
    options = [f"--address={chief}", f"--node-manager-port={split_address(address)[1]}", "--block"]
    options += [f"--node-ip-address={ip}" for ip in [_ip_of(address)] if ip]
    environment = {"RAY_AUTH_MODE": "token", **os.environ}  # ray.init sets it, but Ray's command does not
    folder = tempfile.mkdtemp(prefix="mirrored-node-")
    with open(f"{folder}/output", "w+") as output:
        options.append(f"--temp-dir={folder}")  # in a shared folder, nodes that start together take each other's names
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f'--resources={{"{task}": 1}}', *options]
        node = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        keeper = _end_with_this_process(node.pid, folder)
        log.info("%s at %s is a node of the Ray cluster at %s", task, address, chief)
        while node.poll() is None and machine.answers(*split_address(chief)):
            clock.sleep(1)
        failed = node.poll() is not None and machine.answers(*split_address(chief))
        output.seek(0)
        text = output.read().strip()
    keeper.communicate()
    return text if failed else None


def _ip_of(address: str) -> str | None:
    """Returns the IP address of a task's host if it is an address of this machine; None: Ray determines it.

    Many systems map a machine's own name to an address that other machines cannot reach.
    """
    host = split_address(address)[0]
    with contextlib.suppress(OSError):
        for family, *_, (ip, *_) in sorted(socket.getaddrinfo(host, None)):  # IPv4 first
            if host in (ip, "localhost") or not ipaddress.ip_address(ip).is_loopback:
                with contextlib.suppress(OSError), socket.socket(family) as probe:
                    probe.bind((ip, 0))
                    return str(ip)
    return None


def _end_with_this_process(group: int, folder: str) -> subprocess.Popen[bytes]:
    """Starts a process that kills a process group and removes its folder when this process has ended for any reason.

    So no process still writes to the files that this one reads. (After SIGTERM, a node would first contact the chief,
    which may have ended.)
    """
    end = 'cat; kill -s KILL -- "-$0"; rm -rf "$1"'
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(["sh", "-c", end, str(group), folder], **streams)
