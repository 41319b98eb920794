"""Machines and models with names. Where each figure comes from stands beside it, and in docs/scaling.md.

Of a nominal bandwidth a program gets 80 %: an assumption, about what published all-reduce measurements show for large
buffers. Latencies of NVLink, PCIe and InfiniBand are those of NCCL's own tuner (``src/graph/tuning.cc``, protocol
Simple); that of TCP is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster import Cluster, Link
from steptime import Model

USABLE = 0.8
"""Share of a nominal bandwidth that a program gets."""

_US = 1e-6
_GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """A kind of host and its network.

    Attributes:
        about: where the figures come from.
        memory: bytes of one device.
        overlapped: whether collectives run beside backward, which they cannot where they need the core that computes.
    """

    about: str
    devices: int
    inside: Link
    across: Link
    adapters: int
    memory: float
    overlapped: bool = True

    def cluster(self, hosts: int) -> Cluster:
        """So many of them."""
        return Cluster(hosts, self.devices, self.inside, self.across, self.adapters)


HARDWARE = {
    "nvlink-400g": Hardware(
        "8 H100 (NVLink 450 GB/s each way), 8 adapters of 400 Gb/s",
        8,
        Link(3.4 * _US, USABLE * 450 * _GB),
        Link(14 * _US, USABLE * 50 * _GB),
        adapters=8,
        memory=80 * _GB,
    ),
    "nvlink-200g": Hardware(
        "8 A100 (NVLink 300 GB/s each way), 8 adapters of 200 Gb/s",
        8,
        Link(3.4 * _US, USABLE * 300 * _GB),
        Link(14 * _US, USABLE * 25 * _GB),
        adapters=8,
        memory=80 * _GB,
    ),
    "pcie-100g": Hardware(
        "8 GPUs on PCIe 4.0 x16 (32 GB/s), one adapter of 100 Gb/s, TCP",
        8,
        Link(5.7 * _US, USABLE * 32 * _GB),
        Link(30 * _US, USABLE * 12.5 * _GB),
        adapters=1,
        memory=40 * _GB,
    ),
    "cpu-10g": Hardware(
        "2 CPU towers in shared memory as measured here, one adapter of 10 Gb/s, TCP",
        2,
        Link(6 * _US, 11.4 * _GB),
        Link(30 * _US, USABLE * 1.25 * _GB),
        adapters=1,
        memory=32 * _GB,
        overlapped=False,
    ),
}


@dataclass(frozen=True)
class Preset:
    """A model on one device; ``about`` says where the figures come from, ``unit`` what its batch counts."""

    about: str
    unit: str
    model: Model


def _transformer(parameters: float, tokens: float, tied: float) -> Model:
    """bf16 parameters and gradients, Adam in fp32 with a master copy: 12 bytes of state for each parameter.

    6 operations for each parameter and token, at 40 % of an H100's 989 dense bf16 TFLOP/s; backward is two thirds.
    Adam reads and writes 28 bytes for each parameter, at 80 % of 3.35 TB/s.

    Args:
        tied: share of the parameters in an embedding that is also the head: its gradient is whole only at the end.
    """
    compute = 6 * parameters * tokens / (0.4 * 989e12)
    return Model(
        gradients=2 * parameters,
        forward=compute / 3,
        backward=compute * 2 / 3,
        optimizer=28 * parameters / (USABLE * 3.35e12),
        batch=tokens,
        spread=((tied, 0.0), (1 - tied, 1 - tied), (0.0, tied)) if tied else ((1.0, 1.0),),
        state=12 * parameters,
        noise=0.01,
    )


def _resnet50() -> Model:
    """25.6 million parameters in fp32; times at 2,470 images a second, 128 at once.

    Backward goes through head, stages 4 to 1 and stem: shares of the operations (4.09 billion of
    multiplying and adding for a picture) and of the parameters, counted from the layers.
    """
    step, optimizer = 128 / 2470, 5 * 102.2e6 / (USABLE * 2.0e12)
    compute = step - optimizer
    spread = (
        (0.0005, 0.0802),
        (0.1979, 0.5855),
        (0.3581, 0.2777),
        (0.2513, 0.0477),
        (0.1633, 0.0084),
        (0.0289, 0.0005),
    )
    return Model(102.2e6, compute / 3, compute * 2 / 3, optimizer, 128, spread=spread, state=102.2e6, noise=0.01)


MODELS = {
    "resnet50": Preset(
        "ResNet-50, 102 MB of fp32 gradients, 128 images a device at an A100's 2,470 images/s", "images", _resnet50()
    ),
    "transformer-1.3b": Preset(
        "transformer of 1.3 billion parameters in bf16, 16,384 tokens a device, an H100 at 40 % of its peak",
        "tokens",
        _transformer(1.31e9, 16384, 0.079),
    ),
    "transformer-7b": Preset(
        "transformer of 6.7 billion parameters in bf16, 16,384 tokens a device, an H100 at 40 % of its peak",
        "tokens",
        _transformer(6.74e9, 16384, 0.0),
    ),
    "mlp": Preset(
        "the MLP of scripts/bench: 40 MB of fp32 gradients, 32 examples a CPU tower, phases as measured on one core",
        "examples",
        Model(40.1e6, 0.0105, 0.019, 0.0074, 32, state=40.1e6, noise=0.05),
    ),
}
