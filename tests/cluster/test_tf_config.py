"""TF_CONFIG: the whole grammar, that nothing else gets through, and the type and the wording of each error."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrored
from mirrored import ClusterError, LocalClusterResolver, TFConfigClusterResolver
from mirrored.cluster import resolve
from tests.support.clusters import torchrun_variables
from towers.launching.job import Job, agent_command
from towers.launching.restarting import meeting
from towers.system.messages import split_address


def resolver(**config: object) -> TFConfigClusterResolver:
    return TFConfigClusterResolver({"TF_CONFIG": json.dumps(config)})


def test_chief_comes_first() -> None:
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"], "evaluator": ["e:1"]}
    found = resolver(cluster=cluster, task={"type": "worker", "index": 1}, rpc_layer="grpc", environment="cloud")
    assert found.addresses == ("a:1", "b:1", "c:1")
    assert (found.worker, found.workers) == (2, 3)
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.cluster_spec() == cluster
    assert found.rpc_layer == "grpc"
    assert found.master() == "grpc://a:1"
    chief = resolver(cluster=cluster, task={"type": "chief", "index": 0})
    assert chief.worker == 0
    assert chief.master() == "a:1"


@pytest.mark.parametrize("config", [{}, {"cluster": {}}, {"cluster": {}, "task": {}, "environment": "cloud"}])
def test_no_cluster_is_one_worker(config: dict[str, object]) -> None:
    found = resolver(**config)
    assert (found.workers, found.worker, found.addresses) == (1, 0, ())


def test_unset_is_this_machine() -> None:
    assert isinstance(resolve({}), LocalClusterResolver)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HOSTS = st.sampled_from(["a", "A", "b.c", "10.0.0.1", "[::1]", "[fe80::1%eth0]", "ü", "-a", "a,b", "$a", "a..b", ""])
PORTS = st.sampled_from(["1", "01", "65535", "0", "65536", "-1", "٣", ""])
ADDRESSES = st.builds("{}:{}".format, HOSTS | st.text(max_size=6) | st.text("ab.-_[]:%", max_size=70), PORTS)
JOBS = st.dictionaries(
    st.sampled_from(["chief", "worker", "evaluator", "ps", "boss"]),
    st.lists(st.sampled_from(["a:1", "b:2", "c:3", "[::1]:9", "a", "a:0", 7]) | ADDRESSES, max_size=3) | JSON,
    max_size=3,
)
TASKS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["chief", "worker", "evaluator"]) | JSON,
        "index": st.integers(-1, 3) | st.sampled_from(["0", "1", "00", "٣", " 1", "1_0"]) | JSON,
    },
)
CONFIGS = st.fixed_dictionaries({}, optional={"cluster": JOBS | JSON, "task": TASKS | JSON, "rpc_layer": JSON})
RIGHT = st.builds(
    lambda hosts, index: {
        "cluster": {"worker": [f"{host}:{1 + i}" for i, host in enumerate(hosts)]},
        "task": {"type": "worker", "index": min(index, len(hosts) - 1)},
    },
    st.lists(st.sampled_from(["a", "b.c", "[::1]", "ü"]) | st.text(max_size=6), min_size=1, max_size=3),
    st.integers(0, 2),
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """The text of a configuration, with a piece of it taken out and another put in."""
    text = json.dumps(draw(RIGHT | CONFIGS), ensure_ascii=draw(st.booleans()))
    start = draw(st.integers(0, len(text)))
    return text[:start] + draw(st.text('{}[]",:0123\\u ', max_size=4)) + text[start + draw(st.integers(0, 6)) :]


@given(st.one_of(CONFIGS, RIGHT, JSON).map(json.dumps) | st.text() | damaged() | st.binary().map(os.fsdecode))
@settings(max_examples=300)
def test_whatever_it_holds_is_read_or_refused(text: str) -> None:
    """What is read can be handed to an agent and comes out the same; all else is an error that can be printed."""
    try:
        found = TFConfigClusterResolver({"TF_CONFIG": text})
    except ClusterError as error:
        assert "TF_CONFIG" in str(error)
        str(error).encode()
        return
    assert 0 <= found.worker < found.workers
    assert len({address.lower() for address in found.addresses}) == len(found.addresses)
    found.cluster_spec()
    found.master()
    if found.workers > 1:
        job = Job(2, found.worker, found.workers, found.addresses)
        command = [os.fsencode(word) for word in agent_command(job, ["true"])]  # as exec takes it
        assert not any(b"\0" in word for word in command)
        word, *program = [os.fsdecode(word) for word in command[2:]]
        assert (Job.from_json(word), program) == (job, ["true"])
        for address in found.addresses:
            host, port = split_address(address)
            assert 1 <= port <= 65535
            host.encode("idna")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"task": ' + "1" * 5000 + "}"])
def test_hostile_texts(text: str) -> None:
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        TFConfigClusterResolver({"TF_CONFIG": text})


def tf_config(text: object) -> TFConfigClusterResolver:
    return TFConfigClusterResolver({"TF_CONFIG": text if isinstance(text, str) else json.dumps(text)})


def two_workers(**task: object) -> dict[str, object]:
    return {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0, **task}}


def first_of(**cluster: object) -> dict[str, object]:
    """The configuration of the first process of a cluster's first job."""
    return {"cluster": cluster, "task": {"type": next(iter(cluster)), "index": 0}}


def refused(text: object, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        tf_config(text)


NO_ADDRESS = "must be 'host:port'"
SAME = "are the same address"
NOT_AN_OBJECT = "TF_CONFIG must be a JSON object with 'cluster' and 'task', not "


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{\n  "cluster": {]\n}', r"TF_CONFIG is not JSON: .* at line 2, column 15"),
        ("[]", f"{NOT_AN_OBJECT}a list"),
        ("3", f"{NOT_AN_OBJECT}a number"),
        ('"x"', f"{NOT_AN_OBJECT}a text"),
        ("null", f"{NOT_AN_OBJECT}null"),
        ({"cluster": {"worker": ["a:1"]}}, "TF_CONFIG: task is missing"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}, "TF_CONFIG: task.index is missing"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}, "TF_CONFIG: task.type is missing"),
        (two_workers(index=2), "task.index is 2, but cluster.worker has 2 addresses: it goes from 0 to 1"),
        (two_workers(index=-1), "task.index is -1, but .* it goes from 0 to 1"),
        (two_workers(index="one"), "task.index is 'one', but must be a whole number"),
        (two_workers(index=True), "task.index is True, but must be a whole number"),
        (
            first_of(chief=["a:1"], worker=["b:1", "a:1"]),
            rf"cluster.chief\[0\] and cluster.worker\[1\] {SAME}, a:1",
        ),
        (first_of(worker=["a.b:1", "A.b:01"]), rf"cluster.worker\[0\] and cluster.worker\[1\] {SAME}, A.b:01"),
        (first_of(worker=["a"]), r"cluster.worker\[0\] is 'a', but must be 'host:port'$"),
        (first_of(worker=["a:0"]), r"cluster.worker\[0\] is 'a:0': ports go from 1 to 65535"),
        (first_of(worker=["a:70000"]), "ports go from 1 to 65535"),
        *((first_of(worker=[text]), NO_ADDRESS) for text in ("a,b:1", "-a:1", "a..b:1", "[1::2::3]:1")),
        (first_of(worker=["a:" + "9" * 5000]), NO_ADDRESS),
        (first_of(worker=["::1:2222"]), "put an IPv6 address in brackets"),
        (first_of(worker=[7]), r"cluster.worker\[0\] must be a text 'host:port', not a number"),
        (two_workers(type="boss"), "task.type is 'boss', but must be a job of the cluster: worker"),
        ({"cluster": {"boss": ["a:1"]}, "task": {}}, "unknown job 'boss'; jobs are chief, worker, ps, evaluator"),
        (first_of(chief=["a:1", "b:1"]), "cluster.chief names 2 addresses; there is one chief"),
    ],
)
@pytest.mark.row(1, 3, 4, 5, 6, 7, 8, 9, 10, 11)
def test_impossible_clusters_are_refused(config: object, words: str) -> None:
    refused(config, words)


@pytest.mark.row(2)
def test_empty(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve({"TF_CONFIG": ""}).workers == 1
    assert caplog.messages == ["TF_CONFIG is set but empty: taken as unset"]


@pytest.mark.row(7, 9)
def test_unusual_clusters_are_read() -> None:
    assert tf_config(two_workers(index="1")).worker == 1
    addresses = ["[::1]:2222", "[fe80::1]:1"]
    assert tf_config(first_of(worker=addresses)).addresses == tuple(addresses)


@pytest.mark.row(11)
def test_parameter_servers_are_for_their_strategy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TF_CONFIG": json.dumps(first_of(ps=["a:1"], worker=["b:1"]))}
    found = TFConfigClusterResolver(variables)
    assert (found.task_type, found.addresses) == ("ps", ())
    monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
    for own in (None, found):
        with pytest.raises(ClusterError, match=r"TF_CONFIG: .* use mirrored\.ParameterServerStrategy, or remove"):
            mirrored.MultiWorkerMirroredStrategy(own)


@pytest.mark.row(11)
def test_evaluator() -> None:
    resolver = tf_config(first_of(evaluator=["c:1"], worker=["a:1", "b:1"]))
    assert (resolver.worker, resolver.workers) == (0, 1)
    assert resolver.task_type == "evaluator"


@pytest.mark.row(14)
def test_tf_config_and_world_size_disagree() -> None:
    environ = {"TF_CONFIG": json.dumps(two_workers()), **torchrun_variables(), "WORLD_SIZE": "1"}
    with pytest.raises(ClusterError, match="TF_CONFIG names worker 0 of 2, the variables RANK.* name worker 0 of 1"):
        resolve(environ)


def test_two_spellings_of_one_address_are_one() -> None:
    for one, other in (("[::1]:5", "[0:0:0::1]:5"), ("Host:5", "host:5"), ("localhost:5", "127.0.0.1:5")):
        refused(first_of(worker=[one, other]), r"cluster.worker\[0\] and cluster.worker\[1\] are the same address")
        assert meeting.compare_clusters(0, message_of(one), 1, message_of(other)) is None


def message_of(address: str) -> dict[str, object]:
    return {"origin": "TF_CONFIG", "addresses": [address, "b:2"], "restarts": False}
