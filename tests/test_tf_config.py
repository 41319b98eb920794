"""TF_CONFIG: the whole grammar, and that nothing else gets through."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirrored.cluster import ClusterError, LocalClusterResolver, TFConfigClusterResolver, resolve


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
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
JOBS = st.dictionaries(
    st.sampled_from(["chief", "worker", "evaluator", "ps", "boss"]),
    st.lists(st.sampled_from(["a:1", "b:2", "c:3", "[::1]:9", "a", "a:0", 7]), max_size=3) | JSON,
    max_size=3,
)
TASKS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["chief", "worker", "evaluator"]) | JSON, "index": st.integers(-1, 3) | JSON}
)
CONFIGS = st.fixed_dictionaries({}, optional={"cluster": JOBS | JSON, "task": TASKS | JSON, "rpc_layer": JSON})


@given(CONFIGS | JSON)
def test_whatever_json_it_holds_is_read_or_refused(config: object) -> None:
    try:
        found = TFConfigClusterResolver({"TF_CONFIG": json.dumps(config)})
    except ClusterError as error:
        assert "TF_CONFIG" in str(error)
    else:
        assert 0 <= found.worker < found.workers
        assert len(set(found.addresses)) == len(found.addresses)


@given(st.text())
def test_whatever_text_it_holds_is_read_or_refused(text: str) -> None:
    try:
        TFConfigClusterResolver({"TF_CONFIG": text})
    except ClusterError as error:
        assert "TF_CONFIG" in str(error)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"task": ' + "1" * 5000 + "}"])
def test_hostile_texts(text: str) -> None:
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        TFConfigClusterResolver({"TF_CONFIG": text})
