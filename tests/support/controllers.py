"""What a cluster's controller makes of the files in ``examples/clusters/``: processes with their variables.

The variables are those that the sources of the controllers set: Kubeflow's Training Operator 1.9
(``pkg/controller.v1/pytorch/envvar.go``, ``master.go``, ``tensorflow/tensorflow.go``), Kubeflow Trainer 2.3
(``pkg/runtime/framework/plugins/torch/torch.go``), and those of srun's manual page.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import yaml

from tests.support.jobs import ROOT

CLUSTERS = ROOT / "examples" / "clusters"
TOKEN = "a secret of all pods"

Manifest = dict[str, Any]


@dataclasses.dataclass
class Pod:
    """A container that a controller starts.

    Attributes:
        name: its host name.
        names: those under which others look it up.
        command: the words that are run in it.
        variables: what is set there.
    """

    name: str
    names: Sequence[str]
    command: list[str]
    variables: dict[str, str]


def read(name: str) -> list[Manifest]:
    """The documents of one of the files."""
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def pods_of(name: str) -> list[Pod]:
    """The pods or containers of one of the files, in the order of their numbers."""
    documents = read(name)
    kinds = {"TFJob": tf_job, "PyTorchJob": pytorch_job, "TrainingRuntime": train_job}
    kind = documents[0].get("kind")
    return kinds[kind](*documents) if kind in kinds else compose(*documents)


def tf_job(job: Manifest) -> list[Pod]:
    """Without a chief: TF_CONFIG in the container "tensorflow" of each worker, at the names of headless services."""
    name, space = job["metadata"]["name"], job["metadata"]["namespace"]
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    names = [f"{name}-worker-{index}" for index in range(worker["replicas"])]
    addresses = [f"{own}.{space}.svc:2222" for own in names]
    container = _container(worker["template"]["spec"], "tensorflow")
    pods = []
    for index, own in enumerate(names):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task, "environment": "cloud"}
        variables = {**_stated(container, own), "TF_CONFIG": json.dumps(config)}
        pods.append(Pod(own, [f"{own}.{space}.svc"], container["command"], variables))
    return pods


def pytorch_job(job: Manifest) -> list[Pod]:
    """With a master: RANK counts pods, WORLD_SIZE towers; torchrun's options as PET_…. Without: these alone."""
    name, spec = job["metadata"]["name"], job["spec"]
    towers = spec.get("nprocPerNode", "auto")
    replicas = [
        (f"{name}-{kind.lower()}-{index}", replica["template"]["spec"])
        for kind, replica in sorted(spec["pytorchReplicaSpecs"].items())
        for index in range(replica["replicas"])
    ]
    pods = []
    for rank, (own, template) in enumerate(replicas):
        container = _container(template, "pytorch")
        variables = {**_stated(container, own), "PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": towers}
        if "Master" in spec["pytorchReplicaSpecs"]:
            master = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456"}
            variables |= master | {f"PET_{variable}": value for variable, value in master.items()}
            variables["WORLD_SIZE"] = str(len(replicas) * (int(towers) if towers.isdecimal() else 1))
            variables["RANK"] = variables["PET_NODE_RANK"] = str(rank)
        variables["PET_NNODES"] = str(len(replicas))
        pods.append(Pod(own, [own], container["command"], variables))
    return pods


def train_job(runtime: Manifest, job: Manifest) -> list[Pod]:
    """Torchrun's options as PET_…, and nothing else."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    container = _container(node["template"]["spec"]["template"]["spec"], "node")
    pods = []
    for index in range(trainer["numNodes"]):
        own = f"{name}-node-0-{index}"
        variables = {
            **_stated(container, own),
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        pods.append(Pod(own, [f"{own}.{name}"], trainer["command"], variables))
    return pods


def compose(file: Manifest) -> list[Pod]:
    """Each service is looked up by its name."""
    pods = []
    for name, service in file["services"].items():
        variables = {
            variable: re.sub(r"\$\{MIRRORED_JOB_TOKEN:\?[^}]*\}", TOKEN, value)
            for variable, value in service["environment"].items()
        }
        pods.append(Pod(name, [name], service["command"], variables))
    return pods


def slurm_tasks(script: pathlib.Path) -> list[dict[str, str]]:
    """The variables of the tasks of a step that has all of the batch script's nodes, ``node[0-…]``."""
    text = script.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE))
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    return [
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
            "SLURM_STEP_NODELIST": f"node[0-{nodes - 1}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
            "SLURM_NODEID": str(task // tasks),
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % tasks),
        }
        for task in range(nodes * tasks)
    ]


def _container(template: Manifest, name: str) -> Manifest:
    """The container of this name, the only one in which a controller sets its variables."""
    [container] = [one for one in template["containers"] if one["name"] == name]
    return container


def _stated(container: Manifest, pod: str) -> dict[str, str]:
    """The variables that the file states itself."""
    variables = {}
    for entry in container["env"]:
        source = entry["valueFrom"]
        secret = source.get("secretKeyRef") == {"name": "mirrored", "key": "job-token"}
        assert secret or source == {"fieldRef": {"fieldPath": "metadata.name"}}, entry
        variables[entry["name"]] = TOKEN if secret else pod
    return variables


def words_for(command: Sequence[str], program: str, folder: pathlib.Path, *arguments: str) -> list[str]:
    """Words for Python that stand for a command of the files.

    Args:
        program: is run instead of the digits.
        folder: for its results.
        arguments: its own; default: those of the digits.
    """
    starters: dict[str, list[str]] = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    starter, script, *own = command
    assert (ROOT / "examples" / pathlib.Path(script).name).is_file()
    return [*starters[starter], program, *(arguments or (word.replace("/results", str(folder)) for word in own))]
