"""TF_CONFIG: the whole grammar, and that nothing else gets through."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirrored import ClusterError, LocalClusterResolver, TFConfigClusterResolver
from mirrored.cluster import resolve
from towers.launching.job import Job, agent_command
from towers.system.text import split_address


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


@pytest.mark.parametrize("config", [{}, {"cluster": {}}, {"task": {"type": "worker", "index": 0}}])
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


def read_or_refuse(text: str) -> None:
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


@given(st.one_of(CONFIGS, RIGHT, JSON).map(json.dumps))
def test_whatever_json_it_holds_is_read_or_refused(text: str) -> None:
    read_or_refuse(text)


@given(st.text() | damaged())
def test_whatever_text_it_holds_is_read_or_refused(text: str) -> None:
    read_or_refuse(text)


@given(st.binary())
def test_whatever_bytes_it_holds_are_read_or_refused(data: bytes) -> None:
    read_or_refuse(os.fsdecode(data))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"task": ' + "1" * 5000 + "}"])
def test_hostile_texts(text: str) -> None:
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        TFConfigClusterResolver({"TF_CONFIG": text})
