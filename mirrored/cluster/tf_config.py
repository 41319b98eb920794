"""Clusters described by ``TF_CONFIG``, as TensorFlow, Kubeflow and Vertex AI write them.

Grammar: a JSON object with

- ``cluster``: maps a job name to a list of ``host:port`` (IPv6 in brackets), or to an object with such an address for
  each index from 0. Jobs are ``chief`` (at most one task; TensorFlow 1's name is ``master``), ``worker``, ``ps`` and
  ``evaluator``. ``ps`` is for ParameterServerStrategy only.
- ``task``: ``type`` and ``index``. The index is a number or its decimal digits.
- ``rpc_layer``: is used by :meth:`TFConfigClusterResolver.master` only.

With a cluster, other keys (``environment``, ``job``, …) are ignored. Worker 0 is the ``chief`` task, if there is one.
The ``worker`` tasks follow in their order. An evaluator is a separate cluster, as in TensorFlow, and need not be named
in ``cluster``.

[Note: no task trains alone by mistake] TensorFlow takes a task without a cluster, or an unknown key in place of
``cluster``, for a program on one machine. Every pod of a job would then train alone, as its chief. Here, this is an
error. So is ``sparseCluster``, which Kubeflow's ``enableDynamicWorker`` writes: it lacks the other workers.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from mirrored.cluster.resolver import ClusterError, ClusterResolver
from towers.system.messages import canonical_address, get_logger

_JOBS = ("chief", "worker", "ps", "evaluator")
_OTHER_KEYS = {"rpc_layer", "environment", "job", "service", "session_master", "eval_session_master", "model_dir"}
"""Keys of TensorFlow's RunConfig and of Vertex AI that describe no cluster."""

log = get_logger("mirrored")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable ``TF_CONFIG``.

    Attributes:
        rpc_layer: the value in ``TF_CONFIG``, or None.

    Raises:
        ClusterError: ``TF_CONFIG`` breaks the grammar. The message names the field.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.origin = "TF_CONFIG"
        self._jobs: dict[str, list[str]] = {}
        self.rpc_layer: str | None = None
        text = environ.get("TF_CONFIG", "")
        if not text.strip():
            return
        config = _parse(text)
        rpc_layer = config.get("rpc_layer")
        if rpc_layer is not None and not isinstance(rpc_layer, str):
            raise ClusterError(f"TF_CONFIG: rpc_layer must be a text, not {_kind(rpc_layer)}")
        self.rpc_layer = rpc_layer or None
        self._jobs = _read_cluster(config)
        if not self._jobs and config.get("task") in (None, {}):
            _check_alone(config)
            return
        self.task_type, self.task_id = _read_task(config, self._jobs)
        if self.task_type in ("ps", "evaluator"):
            return
        chiefs = self._jobs.get("chief", [])
        self.addresses = (*chiefs, *self._jobs.get("worker", []))
        self.workers = len(self.addresses)
        self.worker = self.task_id + (len(chiefs) if self.task_type == "worker" else 0)

    def cluster_spec(self) -> dict[str, list[str]]:
        """Returns the jobs and addresses of ``TF_CONFIG``."""
        return {job: list(addresses) for job, addresses in self._jobs.items()}

    def master(self) -> str:
        """Returns the chief's address, after ``rpc_layer://`` if that was given. Empty for one worker."""
        if not self.addresses:
            return ""
        return f"{self.rpc_layer}://{self.addresses[0]}" if self.rpc_layer else self.addresses[0]


def present(environ: Mapping[str, str]) -> bool:
    """Returns whether ``TF_CONFIG`` is set and not empty. An empty ``TF_CONFIG`` is logged."""
    text = environ.get("TF_CONFIG")
    if text is not None and not text.strip():
        log.info("TF_CONFIG is set but empty: taken as unset")
    return bool(text and text.strip())


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ClusterError(f"TF_CONFIG is not JSON that can be read: {error}") from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task', not {_kind(config)}")
    return config


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _check_alone(config: dict[str, Any]) -> None:
    """Refuses unknown keys; see [Note: no task trains alone by mistake]."""
    if unknown := sorted(config.keys() - _OTHER_KEYS - {"cluster", "task"}):
        raise ClusterError(f"TF_CONFIG has no cluster, but an unknown key {unknown[0]!r}; the key is 'cluster'")


def _read_cluster(config: dict[str, Any]) -> dict[str, list[str]]:
    if "sparseCluster" in config:
        raise ClusterError(
            "TF_CONFIG: sparseCluster does not name the other workers, so this task would train alone: set "
            "enableDynamicWorker of the TFJob to false"
        )
    cluster = config.get("cluster", {})
    if not isinstance(cluster, dict):
        raise ClusterError(f"TF_CONFIG: cluster must be an object of jobs, not {_kind(cluster)}")
    jobs: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for name, addresses in cluster.items():
        job = "chief" if name == "master" else name
        if job not in _JOBS:
            raise ClusterError(f"TF_CONFIG: cluster has an unknown job {name!r}; jobs are {', '.join(_JOBS)}")
        if isinstance(addresses, dict):
            addresses = _in_order(name, addresses)
        if not isinstance(addresses, list):
            raise ClusterError(f"TF_CONFIG: cluster.{name} must be a list of addresses, not {_kind(addresses)}")
        for i, address in enumerate(addresses):
            place = f"cluster.{name}[{i}]"
            _check_address(address, place)
            first = places.setdefault(canonical_address(address), place)
            if first != place:
                raise ClusterError(f"TF_CONFIG: {first} and {place} are the same address, {address}")
        if addresses and job in jobs:
            raise ClusterError("TF_CONFIG: cluster has a 'chief' and a 'master', which are names of the same task")
        if addresses:
            jobs[job] = addresses
    if len(jobs.get("chief", [])) > 1:
        raise ClusterError(f"TF_CONFIG: cluster.chief names {len(jobs['chief'])} addresses; there is one chief")
    return jobs


def _in_order(job: str, addresses: dict[str, Any]) -> list[Any]:
    """Returns the addresses of a job that is an object by index."""
    for i in range(len(addresses)):
        if str(i) not in addresses:
            raise ClusterError(
                f"TF_CONFIG: cluster.{job} is an object with {len(addresses)} addresses, but has none for index {i}; "
                "it must name all tasks"
            )
    return [addresses[str(i)] for i in range(len(addresses))]


def _check_address(address: Any, place: str) -> None:
    if not isinstance(address, str):
        raise ClusterError(f"TF_CONFIG: {place} must be a text 'host:port', not {_kind(address)}")
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|(\w(?:[\w.-]*\w)?)):([0-9]{1,9})", address)
    if match is None or not _is_host(match[1], match[2]):
        hint = ""
        if "://" in address:
            hint = f"; leave out {address.partition('://')[0]!r} and '://'"
        elif address.count(":") > 1 and "[" not in address:
            hint = "; put an IPv6 address in brackets"
        raise ClusterError(f"TF_CONFIG: {place} is {address!r}, but must be 'host:port'{hint}")
    if not 1 <= int(match[3]) <= 65535:
        raise ClusterError(f"TF_CONFIG: {place} is {address!r}: ports go from 1 to 65535")


def _is_host(ipv6: str | None, name: str) -> bool:
    try:
        if ipv6 is not None:
            ipaddress.IPv6Address(ipv6)
        else:
            name.encode("idna")  # as a name lookup does
    except ValueError:
        return False
    return True


def _read_task(config: dict[str, Any], jobs: dict[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict):
        problem = "is missing" if task is None else f"must be an object, not {_kind(task)}"
        raise ClusterError(
            f"TF_CONFIG: task {problem}; it must name the task of this process: {{'type': 'worker', 'index': 0}}"
        )
    kind = "chief" if task.get("type") == "master" else task.get("type")
    if kind != "evaluator" and not jobs.keys() - {"evaluator"}:
        raise ClusterError(
            f"TF_CONFIG names a task, {kind!r}, but no cluster that it could belong to, so every task would train "
            "alone: name the addresses of all tasks in 'cluster', or unset TF_CONFIG to train on this machine"
        )
    if not isinstance(kind, str) or kind not in {*jobs, "evaluator"}:
        problem = "is missing" if kind is None else f"is {kind!r}"
        raise ClusterError(f"TF_CONFIG: task.type {problem}, but must be a job of the cluster: {', '.join(jobs)}")
    index = task.get("index")
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        problem = "is missing" if index is None else f"is {index!r}"
        raise ClusterError(f"TF_CONFIG: task.index {problem}, but must be a whole number")
    if kind not in jobs:  # an evaluator, of which the cluster need not know
        if index < 0:
            raise ClusterError(f"TF_CONFIG: task.index is {index}, but must be a whole number from 0")
        return kind, index
    if not 0 <= index < len(jobs[kind]):
        raise ClusterError(
            f"TF_CONFIG: task.index is {index}, but cluster.{kind} has {len(jobs[kind])} "
            f"address{'es' if len(jobs[kind]) > 1 else ''}: it goes from 0 to {len(jobs[kind]) - 1}"
        )
    return kind, index


def is_evaluator(strategy: Any) -> bool:
    """Returns whether this process must evaluate: as the task ``evaluator`` of TF_CONFIG, or in ``mirrored evaluate``.

    TF_CONFIG counts even with strategies that do not read it, such as MirroredStrategy.
    """
    return "evaluator" in (os.environ.get("MIRRORED_TASK"), *(each.task_type for each in resolvers_of(strategy)))


def resolvers_of(strategy: Any) -> list[ClusterResolver]:
    """Returns the resolver of a strategy, if it has one, and that of TF_CONFIG."""
    return [each for each in (strategy.cluster_resolver, TFConfigClusterResolver()) if each is not None]
