"""``TF_CONFIG`` as TensorFlow, Kubeflow's operators, Vertex AI and SageMaker write it, and the mistakes of people."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mirrored
from mirrored.cluster import check_no_other_workers, resolve
from mirrored.evaluation import is_evaluator


def hosts(*names: str, port: int = 2222) -> list[str]:
    return [f"{name}:{port}" for name in names]


def task(kind: str, index: Any = 0, **more: Any) -> dict[str, Any]:
    return {"type": kind, "index": index, **more}


PODS = {
    job: hosts(*(f"net-{job}-{i}.jobs.svc" for i in range(n))) for job, n in (("chief", 1), ("worker", 2), ("ps", 2))
}
TWO = hosts("10.0.0.1", "10.0.0.2")
CHIEF = {"chief": PODS["chief"], "worker": PODS["worker"]}
MASTER = {"master": PODS["chief"], "worker": PODS["worker"]}
CLOUD = {"environment": "cloud"}
VERTEX = {**CLOUD, "job": '{"python_module":"", "args":["--epochs=3"]}'}
SAGEMAKER = hosts("algo-1", "algo-2")
SPARSE = {"sparseCluster": {"worker": {"1": "net-worker-1:2222"}, "ps": []}}

ACCEPTED: list[tuple[str, dict[str, Any], tuple[str, int, int, int]]] = [
    # TensorFlow's guides: two workers; a chief; an evaluator that the cluster does or does not name
    ("worker 0", {"cluster": {"worker": TWO}, "task": task("worker")}, ("worker", 0, 0, 2)),
    ("worker 1", {"cluster": {"worker": TWO}, "task": task("worker", 1)}, ("worker", 1, 1, 2)),
    ("index as text", {"cluster": {"worker": TWO}, "task": task("worker", "1")}, ("worker", 1, 1, 2)),
    ("chief", {"cluster": CHIEF, "task": task("chief")}, ("chief", 0, 0, 3)),
    ("worker with a chief", {"cluster": CHIEF, "task": task("worker", 1)}, ("worker", 1, 2, 3)),
    ("evaluator", {"cluster": {**CHIEF, "evaluator": hosts("e")}, "task": task("evaluator")}, ("evaluator", 0, 0, 1)),
    ("unnamed evaluator", {"cluster": CHIEF, "task": task("evaluator")}, ("evaluator", 0, 0, 1)),
    ("evaluator 1", {"cluster": {"worker": TWO}, "task": task("evaluator", 1)}, ("evaluator", 1, 0, 1)),
    ("only evaluators", {"cluster": {"evaluator": hosts("e")}, "task": task("evaluator")}, ("evaluator", 0, 0, 1)),
    ("evaluator alone", {"task": task("evaluator")}, ("evaluator", 0, 0, 1)),
    ("one worker", {"cluster": {"worker": TWO[:1]}, "task": task("worker")}, ("worker", 0, 0, 1)),
    ("empty jobs", {"cluster": {"chief": [], "worker": TWO, "ps": []}, "task": task("worker", 1)}, ("worker", 1, 1, 2)),
    ("rpc_layer", {"cluster": {"worker": TWO}, "task": task("worker"), "rpc_layer": "grpc"}, ("worker", 0, 0, 2)),
    (
        "job by index",
        {"cluster": {"worker": {"1": TWO[1], "0": TWO[0]}}, "task": task("worker", 1)},
        ("worker", 1, 1, 2),
    ),
    ("IPv6", {"cluster": {"worker": ["[fd00::1]:22", "[fd00::2]:22"]}, "task": task("worker", 1)}, ("worker", 1, 1, 2)),
    ("localhost", {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": task("worker")}, ("worker", 0, 0, 2)),
    # TensorFlow 1's RunConfig
    ("master", {"cluster": MASTER, "task": task("master"), **CLOUD}, ("chief", 0, 0, 3)),
    ("worker with a master", {"cluster": MASTER, "task": task("worker"), **CLOUD}, ("worker", 0, 1, 3)),
    (
        "RunConfig",
        {"cluster": CHIEF, "task": task("chief"), "session_master": "", "model_dir": "/m", "service": {}},
        ("chief", 0, 0, 3),
    ),
    # Kubeflow: v1alpha1 (tf-operator), v1 (TFJob), and the training operator with an evaluator replica
    ("v1alpha1", {"cluster": {"master": PODS["chief"]}, "task": task("master"), **CLOUD}, ("chief", 0, 0, 1)),
    ("v1", {"cluster": {"worker": PODS["worker"]}, "task": task("worker", 1), **CLOUD}, ("worker", 1, 1, 2)),
    ("v1 chief", {"cluster": CHIEF, "task": task("worker", 0), **CLOUD}, ("worker", 0, 1, 3)),
    (
        "v1 evaluator",
        {"cluster": {**CHIEF, "evaluator": hosts("net-evaluator-0")}, "task": task("worker", 1), **CLOUD},
        ("worker", 1, 2, 3),
    ),
    ("v1 alone", {"cluster": {"worker": PODS["worker"][:1]}, "task": task("worker"), **CLOUD}, ("worker", 0, 0, 1)),
    ("v1 ps", {"cluster": PODS, "task": task("ps", 1), **CLOUD}, ("ps", 1, 0, 1)),
    ("v1 chief of ps", {"cluster": PODS, "task": task("chief"), **CLOUD}, ("chief", 0, 0, 3)),
    # Vertex AI and AI Platform
    ("Vertex", {"cluster": CHIEF, "task": task("worker", 1, trial="3"), **VERTEX}, ("worker", 1, 2, 3)),
    ("Vertex chief", {"cluster": CHIEF, "task": task("chief", 0, cloud="x"), **VERTEX}, ("chief", 0, 0, 3)),
    ("Vertex alone", {"cluster": {"chief": ["localhost:2222"]}, "task": task("chief"), **VERTEX}, ("chief", 0, 0, 1)),
    ("AI Platform alone", {"cluster": {}, "task": {}, **VERTEX}, ("worker", 0, 0, 1)),
    # SageMaker
    ("SageMaker", {"cluster": {"worker": SAGEMAKER}, "task": task("worker", 1), **CLOUD}, ("worker", 1, 1, 2)),
    (
        "SageMaker ps",
        {"cluster": {"master": SAGEMAKER[:1], "worker": SAGEMAKER[1:], "ps": hosts("algo-1", port=2223)}, **CLOUD}
        | {"task": task("master")},
        ("chief", 0, 0, 2),
    ),
    ("nothing", {}, ("worker", 0, 0, 1)),
    ("only an environment", {**CLOUD}, ("worker", 0, 0, 1)),
]

ALONE = "no cluster that it could belong to, so every task would train alone"
REFUSED: list[tuple[str, Any, str]] = [
    ("no cluster", {"task": task("worker")}, ALONE),
    ("no cluster, chief", {"task": task("chief")}, ALONE),
    ("no cluster, master", {"task": task("master"), **CLOUD}, ALONE),
    ("no cluster, ps", {"task": task("ps")}, ALONE),
    ("empty cluster", {"cluster": {}, "task": task("worker", 1)}, ALONE),
    ("empty cluster, worker 0", {"cluster": {}, "task": task("worker")}, ALONE),
    ("empty worker", {"cluster": {"worker": []}, "task": task("worker", 3)}, ALONE),
    ("only evaluators", {"cluster": {"evaluator": hosts("e")}, "task": task("worker")}, ALONE),
    ("task without type", {"task": {"index": 1}}, ALONE),
    ("sparse cluster", {**SPARSE, "task": task("worker", 1)}, "sparseCluster .* enableDynamicWorker"),
    ("sparse cluster and ps", {"sparseCluster": {"ps": ["a:1"]}, "task": task("ps")}, "sparseCluster"),
    ("misspelt cluster", {"clusters": {"worker": TWO}}, "unknown key 'clusters'"),
    ("misspelt cluster, task", {"clusters": {"worker": TWO}, "task": task("worker", 1)}, ALONE),
    ("Cluster", {"Cluster": {"worker": TWO}}, "unknown key 'Cluster'"),
    ("cluster_spec", {"cluster_spec": {"worker": TWO}}, "unknown key 'cluster_spec'"),
    ("CLUSTER_SPEC of Vertex", {"cluster": {"workerpool0": TWO}, "task": task("workerpool0")}, "job 'workerpool0'"),
    ("workers", {"cluster": {"workers": TWO}, "task": task("workers")}, "unknown job 'workers'"),
    ("no task", {"cluster": {"worker": TWO}}, "task is missing"),
    ("tasks", {"cluster": {"worker": TWO}, "tasks": task("worker")}, "task is missing"),
    ("Worker", {"cluster": {"worker": TWO}, "task": task("Worker")}, "task.type is 'Worker'"),
    ("chief of workers", {"cluster": {"worker": TWO}, "task": task("chief")}, "task.type is 'chief'"),
    ("missing index", {"cluster": {"worker": TWO}, "task": {"type": "worker"}}, "task.index is missing"),
    ("id", {"cluster": {"worker": TWO}, "task": {"type": "worker", "id": 1}}, "task.index is missing"),
    ("index of a third", {"cluster": {"worker": TWO}, "task": task("worker", 2)}, "it goes from 0 to 1"),
    ("negative evaluator", {"cluster": {"worker": TWO}, "task": task("evaluator", -1)}, "index is -1"),
    ("index 1.0", {"cluster": {"worker": TWO}, "task": task("worker", 1.0)}, "must be a whole number"),
    ("chief and master", {"cluster": {**CHIEF, "master": hosts("m")}, "task": task("chief")}, "'chief' and a 'master'"),
    ("two masters", {"cluster": {"master": TWO}, "task": task("master")}, "there is one chief"),
    ("incomplete job", {"cluster": {"worker": {"0": "a:1", "2": "c:1"}}, "task": task("worker")}, "none for index 1"),
    ("indices from 1", {"cluster": {"worker": {"1": "a:1"}}, "task": task("worker", 1)}, "none for index 0"),
    (
        "grpc://",
        {"cluster": {"worker": ["grpc://10.0.0.1:2222"]}, "task": task("worker")},
        "leave out 'grpc' and '://'",
    ),
    ("no port", {"cluster": {"worker": ["10.0.0.1"]}, "task": task("worker")}, "must be 'host:port'"),
    ("one text", {"cluster": {"worker": "a:1,b:1"}, "task": task("worker")}, "must be a list of addresses"),
    ("twice the same", {"cluster": {"worker": ["a:1", "a:1"]}, "task": task("worker")}, "are the same address"),
    ("cluster as a list", {"cluster": TWO, "task": task("worker")}, "cluster must be an object of jobs"),
    ("double encoding", json.dumps(json.dumps({"cluster": {}})), "must be a JSON object"),
    ("single quotes", "{'cluster': {}}", "is not JSON"),
]


def environment(config: Any) -> dict[str, str]:
    return {"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)}


@pytest.mark.parametrize(("config", "found"), [each[1:] for each in ACCEPTED], ids=[each[0] for each in ACCEPTED])
def test_accepted(config: dict[str, Any], found: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = resolve(environment(config))
    assert (resolver.task_type, resolver.task_id, resolver.worker, resolver.workers) == found
    monkeypatch.setenv("TF_CONFIG", environment(config)["TF_CONFIG"])
    assert is_evaluator(mirrored.OneDeviceStrategy()) is (found[0] == "evaluator")


@pytest.mark.parametrize(("config", "words"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_refused(config: Any, words: str) -> None:
    with pytest.raises(mirrored.ClusterError, match=words):
        resolve(environment(config))
    with pytest.raises(mirrored.ClusterError, match=words):
        check_no_other_workers(environment(config), None, "MirroredStrategy")
