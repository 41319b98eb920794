"""Descriptions of clusters in TF_CONFIG that cannot be right: the type and the wording of each error."""

from __future__ import annotations

import json

import pytest

from mirrored import ClusterError, TFConfigClusterResolver
from mirrored.cluster import resolve
from tests.support.clusters import torchrun_variables
from towers.launching import rendezvous


def tf_config(text: object) -> TFConfigClusterResolver:
    return TFConfigClusterResolver({"TF_CONFIG": text if isinstance(text, str) else json.dumps(text)})


def two_workers(**task: object) -> dict[str, object]:
    return {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0, **task}}


def refused(text: object, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        tf_config(text)


@pytest.mark.row(1)
def test_not_json() -> None:
    refused('{\n  "cluster": {]\n}', r"TF_CONFIG is not JSON: .* at line 2, column 15")


@pytest.mark.row(2)
def test_empty(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve({"TF_CONFIG": ""}).workers == 1
    assert caplog.messages == ["TF_CONFIG is set but empty: taken as unset"]


@pytest.mark.parametrize(("text", "kind"), [("[]", "a list"), ("3", "a number"), ('"x"', "a text"), ("null", "null")])
@pytest.mark.row(3)
def test_no_object(text: str, kind: str) -> None:
    refused(text, f"TF_CONFIG must be a JSON object with 'cluster' and 'task', not {kind}")


@pytest.mark.row(4)
def test_no_task_or_index() -> None:
    refused({"cluster": {"worker": ["a:1"]}}, "TF_CONFIG: task is missing")
    refused({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}, "TF_CONFIG: task.index is missing")
    refused({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}, "TF_CONFIG: task.type is missing")


@pytest.mark.row(5)
def test_index_too_large() -> None:
    refused(two_workers(index=2), "task.index is 2, but cluster.worker has 2 addresses: it goes from 0 to 1")


@pytest.mark.row(6)
def test_negative_index() -> None:
    refused(two_workers(index=-1), "task.index is -1, but .* it goes from 0 to 1")


@pytest.mark.row(7)
def test_index_as_text() -> None:
    assert tf_config(two_workers(index="1")).worker == 1
    refused(two_workers(index="one"), "task.index is 'one', but must be a whole number")
    refused(two_workers(index=True), "task.index is True, but must be a whole number")


@pytest.mark.row(8)
def test_the_same_address_twice() -> None:
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "task": {"type": "chief", "index": 0}}
    refused(config, r"cluster.chief\[0\] and cluster.worker\[1\] are the same address, a:1")
    config = {"cluster": {"worker": ["a.b:1", "A.b:01"]}, "task": {"type": "worker", "index": 0}}
    refused(config, r"cluster.worker\[0\] and cluster.worker\[1\] are the same address, A.b:01")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("a", r"cluster.worker\[0\] is 'a', but must be 'host:port'$"),
        ("a:0", r"cluster.worker\[0\] is 'a:0': ports go from 1 to 65535"),
        ("a:70000", "ports go from 1 to 65535"),
        ("a:" + "9" * 5000, "must be 'host:port'"),
        ("a,b:1", "must be 'host:port'"),
        ("-a:1", "must be 'host:port'"),
        ("a..b:1", "must be 'host:port'"),
        ("[1::2::3]:1", "must be 'host:port'"),
        ("::1:2222", "put an IPv6 address in brackets"),
        (7, r"cluster.worker\[0\] must be a text 'host:port', not a number"),
    ],
)
@pytest.mark.row(9)
def test_addresses(address: object, words: str) -> None:
    refused({"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}, words)


@pytest.mark.row(9)
def test_ipv6_in_brackets() -> None:
    config = {"cluster": {"worker": ["[::1]:2222", "[fe80::1]:1"]}, "task": {"type": "worker", "index": 0}}
    assert tf_config(config).addresses == ("[::1]:2222", "[fe80::1]:1")


@pytest.mark.row(10)
def test_unknown_task_and_two_chiefs() -> None:
    refused(two_workers(type="boss"), "task.type is 'boss', but must be a job of the cluster: worker")
    refused({"cluster": {"boss": ["a:1"]}, "task": {}}, "unknown job 'boss'; jobs are chief, worker, evaluator")
    config = {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}
    refused(config, "cluster.chief names 2 addresses; there is one chief")


@pytest.mark.row(11)
def test_ps_and_evaluator() -> None:
    refused({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}, "no parameter servers: remove the job 'ps'")
    config = {
        "cluster": {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]},
        "task": {"type": "evaluator", "index": 0},
    }
    resolver = tf_config(config)
    assert (resolver.worker, resolver.workers) == (0, 1)
    assert resolver.task_type == "evaluator"


@pytest.mark.row(14)
def test_tf_config_and_world_size_disagree() -> None:
    environ = {"TF_CONFIG": json.dumps(two_workers()), **torchrun_variables(), "WORLD_SIZE": "1"}
    with pytest.raises(ClusterError, match="TF_CONFIG says worker 0 of 2, the variables RANK.* say worker 0 of 1"):
        resolve(environ)


def test_two_spellings_of_one_address_are_one() -> None:
    for one, other in (("[::1]:5", "[0:0:0::1]:5"), ("Host:5", "host:5"), ("localhost:5", "127.0.0.1:5")):
        config = {"cluster": {"worker": [one, other]}, "task": {"type": "worker", "index": 0}}
        refused(config, r"cluster.worker\[0\] and cluster.worker\[1\] are the same address")
        assert rendezvous.compare_clusters(0, message_of(one), 1, message_of(other)) is None


def message_of(address: str) -> dict[str, object]:
    return {"origin": "TF_CONFIG", "addresses": [address, "b:2"]}
