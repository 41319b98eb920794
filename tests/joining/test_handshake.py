"""Unauthenticated peers are refused, and what they leave in the store harms no job."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from mirrored import TorchrunClusterResolver
from tests.support.clusters import free_port, start_agent, torchrun_variables
from tests.support.handshakes import KEYS, TOKEN, TOWER, both_meet, join, meet, serve, together, tower
from tests.support.jobs import ROOT
from tests.support.processes import family
from tests.support.programs import end_of, run_program, start_function, start_program
from tests.support.sockets import listening
from tests.support.waiting import HANG
from towers import HandshakeError, StartupError
from towers.collectives.connecting import compare_towers
from towers.joining import participant
from towers.joining.participant import versions
from towers.joining.store import OWNER, Message, SignedStore, sign
from towers.launching.job import Job
from towers.topology import JOB_TOKEN

WAITS = str(ROOT / "tests" / "programs" / "waits.py")


@pytest.fixture
def store() -> TCPStore:
    return serve()


@pytest.mark.extended
def test_a_tower_with_another_token_is_refused_and_the_job_goes_on() -> None:
    variables = torchrun_variables(MASTER_PORT=str(free_port()), **{JOB_TOKEN: "right"})
    first = start_program([WAITS, "end"], env=variables)
    try:
        refused = run_program([WAITS], env={**variables, "RANK": "1", JOB_TOKEN: "wrong"}, code=1)
        last = refused.stderr.strip().splitlines()[-1]
        host = f"(on {os.uname().nodename})"
        assert last.startswith(
            f"towers.errors.HandshakeError: tower 1 {host} does not belong to the job that meets at 127.0.0.1:"
        )
        assert f"a message of a process on {os.uname().nodename} with another job token" in last
        assert "wrong" not in refused.stderr
        run_program([WAITS, "end"], env={**variables, "RANK": "1"}, code=0)
        assert first.communicate(timeout=HANG)[0] == "ready\n"
        assert first.returncode == 0
    finally:
        first.kill()
        first.communicate(timeout=HANG)


def test_a_tower_that_comes_before_the_chief_has_signed_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    class Joined(TCPStore):
        def wait(self, *args: object) -> None:
            SignedStore(served, TOKEN).write(OWNER, {"host": "the chief's"})
            super().wait(*args)

    monkeypatch.setattr(participant, "TCPStore", Joined)
    with pytest.raises(HandshakeError, match="a message of a process on the chief's with another job token"):
        join(served, token="wrong")


@pytest.mark.extended
def test_an_unauthenticated_peer_at_a_job_of_our_own_agent_is_refused() -> None:
    job = start_program([WAITS, "two"])
    try:
        assert job.stdout.readline() == "ready\n"
        [(_, port)] = listening(job.pid)
        variables = {**torchrun_variables(MASTER_PORT=str(port), RANK="1"), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        refused = run_program([WAITS], env=variables, code=1)
        assert "HandshakeError: tower 1 (on" in refused.stderr
        assert "with another job token" in refused.stderr
        assert job.poll() is None
        assert len(family(job.pid)) == 4, "the agent, its fork server and two towers"
    finally:
        job.terminate()
        job.communicate(timeout=HANG)


@pytest.mark.extended
def test_workers_with_different_tokens_are_refused() -> None:
    addresses = (f"127.0.0.1:{free_port()}", "127.0.0.1:2")
    first, second = (
        start_agent(Job(1, worker, 2, addresses, "TF_CONFIG"), "-c", "print('ran')", **{JOB_TOKEN: token})
        for worker, token in enumerate(["right", "wrong"])
    )
    _, refused = end_of(second, 1)
    assert first.poll() is None, "it waits for the right one"
    first.terminate()
    assert first.communicate()[0] == ""
    assert refused.startswith(f"mirrored: worker 1 (on {os.uname().nodename}) does not belong to the job that meets at")
    assert len(refused.splitlines()) == 1


def test_where_the_token_comes_from() -> None:
    def token(**changes: str) -> str:
        topology = TorchrunClusterResolver(torchrun_variables(**changes)).topology
        assert "secret" not in repr(topology)
        return topology.token

    assert token() == ""
    assert token(TORCHELASTIC_RUN_ID="run") == "run"
    assert token(TORCHELASTIC_RUN_ID="run", MIRRORED_JOB_TOKEN="secret") == "secret"
    # The agents of several workers have run ids of their own.
    assert token(TORCHELASTIC_RUN_ID="run", TOWERS_STARTED_BY="python with TF_CONFIG") == ""


GARBAGE: dict[str, bytes | Callable[[str], str]] = {
    "nothing": b"",
    "bytes": b"\xff\x00\x80",
    "a list": b"[]",
    "an empty object": b"{}",
    "an object of another kind": b'{"message": 5, "signature": 6}',
    "a message that is not an object": b'{"message": "[1]", "signature": "x"}',
    "a signature of other letters": json.dumps({"message": "{}", "signature": "ü\ud800"}).encode(),
    "brackets": b"[" * 100_000,
    "a long number": b'{"message": ' + b"1" * 5000 + b"}",
    "much": b'"' + b"x" * 2**21 + b'"',
    "a host of brackets": json.dumps({"message": '{"host": ' + "[" * 900 + "]" * 900 + "}", "signature": "x"}).encode(),
    "another job's": lambda key: sign("another", key, {"host": "elsewhere\x1b[2J"}),
    "a message of no token": lambda key: sign("", key, {"host": "elsewhere"}),
    "a message from another key": lambda key: sign(TOKEN, f"{key}0", {"host": "elsewhere"}),
    "another message's signature": lambda key: sign(TOKEN, key, {}).replace('message":"{', 'message":"{ '),
}


def store_garbage(store: Store, key: str, kind: str) -> None:
    garbage = GARBAGE[kind]
    store.set(key, garbage(key) if callable(garbage) else garbage)


@pytest.mark.parametrize("kind", GARBAGE)
def test_towers_meet_whatever_unauthenticated_peers_have_left_in_the_store(store: TCPStore, kind: str) -> None:
    """That of another job with a token of its own, as under a launcher whose store everybody reaches, too."""
    for key in (*KEYS, "tower/result", "tower/read0"):
        store_garbage(store, key, kind)
    both_meet(store, join(store))


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_tower_that_does_not_come_is_missing_whatever_is_stored_in_its_place(store: TCPStore, kind: str) -> None:
    store_garbage(store, "tower/1", kind)
    with pytest.raises(
        StartupError, match=r"1 of 2 towers did not join within \d+ s: tower 1 \(rank 1\) \(its entry in the store is"
    ) as caught:
        meet(store, 0, seconds=0.0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.extended
def test_who_is_waited_for_is_said_while_there_is_time_to_start_it(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(participant, "_SILENT_SECONDS", 0.0)
    with pytest.raises(StartupError):
        meet(store, 0, seconds=0.1)
    assert capsys.readouterr().err == "mirrored: tower 0 waits for tower 1 (rank 1), for at most 0 s in all\n"
    port = free_port()
    with pytest.raises(StartupError):
        tower(1, port=port, seconds=1.0).open_store()
    assert capsys.readouterr().err == (
        f"mirrored: tower 1 waits for the chief (tower 0) at 127.0.0.1:{port} (from a test), which does not answer "
        "yet, for at most 1 s in all\n"
    )


def test_a_result_reaches_all_though_an_unauthenticated_peer_has_taken_its_key(store: TCPStore) -> None:
    store.set("tower/result", b"all is well")

    def come(store: Store, index: int) -> str:
        with pytest.raises(HandshakeError) as caught:
            meet(store, index, {"device": "cpu", "gpu": [None, 5][index]})
        return str(caught.value)

    first, second = together(come, *(PrefixStore("", store) for _ in range(2)))
    assert first == second
    assert "is damaged: gpu is missing or of another kind" in first


@pytest.mark.parametrize(
    "message", [{}, {"device": 5, "gpu": None}, {"device": "cpu"}, {"device": "cpu", "gpu": [[[]]]}]
)
def test_a_message_of_this_job_that_lacks_a_field_is_an_error_that_names_it(store: TCPStore, message: Message) -> None:
    damaged = {"host": "h\n1", "versions": versions(), **message}
    store.set("tower/1", sign(TOKEN, "tower/1", damaged))
    with pytest.raises(HandshakeError, match=r"the message of tower 1 \(on h\?1\) is damaged: (device|gpu) is missing"):
        meet(store, 0, TOWER)


def test_a_store_that_an_unauthenticated_peer_calls_its_own(store: TCPStore) -> None:
    store.set("towers/owner", b"garbage")
    assert join(store).check(["towers/owner"]), "what is no message gives way"
    store.set("towers/owner", sign("another", "towers/owner", {"host": "x" * 5000}))
    with pytest.raises(HandshakeError, match="tower 1 .* does not belong to the job") as caught:
        join(store)
    assert len(str(caught.value)) < 1000


def test_the_token_is_never_sent(store: TCPStore) -> None:
    both_meet(store, join(store))
    stored = [store.get(key) for key in ("towers/owner", "tower/0", "tower/1")]
    assert all(TOKEN.encode() not in text for text in stored)
    again = [sign(TOKEN, "tower/0", {}) for _ in range(2)]
    assert again[0] != again[1], "the signatures of equal messages tell nothing"


def test_options_that_differ_are_named() -> None:
    message = {"options": {"timeout_seconds": 1}, "host": "h", "machine": "m", "device": "cpu", "gpu": None}
    text = compare_towers(1, {**message, "options": {"timeout_seconds": 2}}, 0, message)
    assert text == (
        "different communication options: {'timeout_seconds': 2} on tower 1 (on h), {'timeout_seconds': 1} on tower 0 "
        "(on h)"
    )


def serve_for_many(soft: int, most: int, count: int) -> None:
    """Prints how many files this process may open while it serves the store of ``count`` towers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
    names = tuple(f"rank {i}" for i in range(count))
    store = tower(0, chief_serves=True, port=free_port(), names=names).open_store()
    print(store.port > 0, *resource.getrlimit(resource.RLIMIT_NOFILE), hard)


@pytest.mark.parametrize("count", [2, 300, 1500])
def test_who_serves_the_store_may_have_a_connection_to_every_tower(count: int) -> None:
    output, _ = start_function(serve_for_many, 600, 3000, count).communicate()
    serves, soft, now, hard = output.split()
    assert (serves, now) == ("True", hard)
    assert int(soft) == min(1000 + 3 * count, int(hard))
