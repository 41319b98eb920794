"""TPUs: scripts on the simulated one, as torch_tpu would start them, and what is said where there is none."""

from __future__ import annotations

import importlib.metadata
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mirrored
from mirrored import CannotStartError
from mirrored.doctor import gpus
from mirrored.doctor.findings import Severity
from tests import simulated_device
from tests.accelerator.server import Server, variables_of
from tests.accelerator.test_start import SCRIPT
from tests.simulated_device import INSTALLED
from tests.simulated_device.tpu import set_tpu_launch_env
from tests.support.programs import end_of, run_command, run_program, start_program
from towers.launching.starting.agent import set_tpu_environment
from towers.launching.starting.simulate_cluster import reserve_ports
from towers.system import accelerator

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
HOSTS = {"TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2", "TORCH_TPU_TOPOLOGY": "1,2,1"}

simulated = pytest.mark.skipif(bool(simulated_device.why_not()), reason=str(simulated_device.why_not()))


@pytest.mark.extended
@simulated
@pytest.mark.parametrize(
    ("run", "strategy"),
    [(run_program, "MirroredStrategy"), (run_program, "TPUStrategy")],
    ids=["MirroredStrategy", "TPUStrategy"],
)
def test_every_tpu_is_used(run: Any, strategy: str) -> None:
    """The first starts as a user does: new Pythons for the agent and each tower."""
    result = run([SCRIPT], env={**variables_of("tpu"), "STRATEGY": strategy}, code=0)
    assert result.stdout.startswith("devices [0, 0], loss ")  # as each tower numbers its own
    assert "2 towers on TPU v4, tpu_dist" in result.stderr


@pytest.mark.extended
@simulated
def test_hosts_of_a_slice() -> None:
    [port] = reserve_ports(1)
    variables = {**variables_of("tpu"), **HOSTS, "STRATEGY": "TPUStrategy", "TOWERS_DEVICES": "tpu:0"}
    variables["MASTER_PORT"] = str(port.getsockname()[1])
    hosts = [start_program([SCRIPT], env={**variables, "TPU_WORKER_ID": str(host)}) for host in range(2)]
    ends = [end_of(host, 0) for host in hosts]
    assert ends[0][0].startswith("devices [0, 0], loss ")
    assert "2 towers of 2 workers on TPU v4, tpu_dist" in ends[0][1]
    port.close()


@pytest.mark.extended
@simulated
@pytest.mark.row(61)
def test_wrong_starts() -> None:
    others = run_program([SCRIPT], env={**variables_of("tpu"), "TOWERS_DEVICES": "tpu:1,tpu:0"})
    assert "ValueError: tower 0 has tpu:0, not tpu:1: leave devices out, or name all in order" in others.stderr
    shared = run_program([SCRIPT], env={**variables_of("tpu"), "TOWERS_DEVICES": "tpu:0,tpu:0"})
    assert "ValueError: devices names tpu:0 more than once" in shared.stderr
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", SCRIPT]
    unprepared = run_command(words, env=variables_of("tpu"))
    assert f"{ADDRESSES} is not set: start by 'python' or" in unprepared.stderr
    lost = run_program([SCRIPT], env={**variables_of("tpu"), **HOSTS}, code=1)
    why = "expected nnodes to match the number of hosts in TPU_WORKER_HOSTNAMES, got 1"
    assert lost.stderr.startswith(f"mirrored: torch_tpu cannot start 2 towers on this host: {why}")


@pytest.mark.extended
@simulated
@pytest.mark.parametrize("server", ["tpu"], indirect=True)
def test_trained(server: Server) -> None:
    """As all tests of accelerators do where MIRRORED_SIMULATED is "tpu"."""
    from tests.accelerator import cases

    [alone] = server.towers(cases.accumulate, devices=["cpu:0"])
    for numbers in server.towers(cases.accumulate, devices=["tpu:0", "tpu:1"]):
        torch.testing.assert_close(numbers, alone, rtol=0, atol=1e-12)


@pytest.mark.row(59)
def test_no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(ValueError, match=r"TPUStrategy: torch_tpu is not installed: pip install"):
            mirrored.TPUStrategy()
    monkeypatch.syspath_prepend(str(INSTALLED))
    with pytest.raises(ValueError, match=r"torch_tpu 0\.2\.0 finds none: it needs a TPU host's /dev/vfio"):
        mirrored.TPUStrategy()
    with pytest.raises(ValueError, match=r"device 'tpu:0' is not understood"):
        mirrored.MirroredStrategy(["tpu:0"])
    with pytest.raises(TypeError, match="has no argument tpu_cluster_resolver: cluster_resolver="):
        mirrored.TPUStrategy(tpu_cluster_resolver=None)


@pytest.mark.row(60)
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "TPU_WORKER_ID is not set"),
        ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is 2, but its number of hosts is 2: it goes from 0 to 1"),
        ({"NODE_RANK": "x", "TPU_WORKER_ID": "0"}, "NODE_RANK='x' is not a whole number"),
        ({"JOB_COMPLETION_INDEX": "0", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"TPU_WORKER_ID": "0", "MASTER_PORT": "65536"}, "MASTER_PORT is 65536; ports go from 1 to 65535"),
    ],
    ids=str,
)
def test_wrong_hosts(variables: dict[str, str], words: str) -> None:
    with pytest.raises(mirrored.ClusterError, match=f"TPU_WORKER_HOSTNAMES: .*{words}"):
        mirrored.TPUClusterResolver(environ={**HOSTS, **variables})


def test_hosts() -> None:
    found = mirrored.TPUClusterResolver(environ={**HOSTS, "TPU_WORKER_ID": "1"})
    assert (found.worker, found.workers, found.task_id) == (1, 2, 1)
    assert found.cluster_spec() == {"worker": ["127.0.0.1:29500", "127.0.0.2:29500"]}
    for names in ("", "localhost", "t1v-n-0,"):
        alone = mirrored.TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": names})
        assert (alone.workers, alone.addresses) == (1, ())


@pytest.fixture
def launch_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.tpu.distributed of the simulated TPU, with none of its variables."""
    monkeypatch.setattr("tests.simulated_device.tpu._resolved", {})
    for name in (ADDRESSES, "TORCH_TPU_TOPOLOGY", "NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    distributed = types.SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env)
    monkeypatch.setattr(torch, "tpu", types.SimpleNamespace(distributed=distributed), raising=False)
    return


@pytest.mark.row(61)
@pytest.mark.usefixtures("launch_env")
def test_towers_that_cannot_work_together() -> None:
    with pytest.raises(CannotStartError, match=r"cannot start 3 towers on this host: No TPU topology found"):
        set_tpu_environment(3, 0, 1)
    set_tpu_environment(2, 0, 1)
    with pytest.raises(CannotStartError, match=f"{ADDRESSES} is for 2 towers, but 4 are to start"):
        set_tpu_environment(4, 0, 1)


@pytest.mark.row(61)
@pytest.mark.usefixtures("launch_env")
def test_hosts_without_the_shape_of_their_slice() -> None:
    with pytest.raises(CannotStartError, match="TORCH_TPU_TOPOLOGY is not set: .* it is the whole slice's, as 4,4,1"):
        set_tpu_environment(2, 0, 2)


def test_the_doctor_says_what_is_missing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DEV", tmp_path)
    assert next(gpus.check({})).subject == ("GPUs" if "not installed" in str(accelerator.missing_tpu()) else "TPUs")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(INSTALLED))
        found = next(gpus.check({"TPU_SKIP_MDS_QUERY": "1"}))
        assert (found.severity, found.what) == (Severity.NOTE, "torch_tpu 0.2.0 finds none")
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    found = next(gpus.check({}))
    assert (found.severity, found.subject) == (Severity.WARNING, "TPUs")
    monkeypatch.syspath_prepend(str(INSTALLED))
    found = next(gpus.check({}))
    assert (found.severity, found.what) == (Severity.WARNING, "torch_tpu 0.2.0 finds none")
    assert found.fix.startswith("it needs a TPU host")
