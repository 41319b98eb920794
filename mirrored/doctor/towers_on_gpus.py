"""A tower on every GPU: do they start, and average what they should through NCCL?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mirrored.doctor import towers_job
from mirrored.doctor.finding import Finding, ok, problem
from towers.errors import TowerFailedError
from towers.system import devices

_SUBJECT = "GPU towers"
_SECONDS = 40.0


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A job of one tower per GPU, where there are two or more."""
    count = devices.count_gpus() if torch.cuda.is_available() else 0
    if count < 2:
        return
    try:
        seen = towers_job.run([f"cuda:{number}" for number in range(count)], "nccl", _SECONDS)
    except TowerFailedError as error:
        yield problem(
            _SUBJECT,
            f"{count} towers cannot work together: {towers_job.reason(error)}",
            "NCCL_DEBUG=WARN mirrored doctor lets NCCL say why; where GPUs only fail together, NCCL_P2P_DISABLE=1 "
            "tells whether reading each other's memory is the reason, and /dev/shm must have room",
        )
        return
    small, large = (f"{seconds * 1e3:.3g} ms" for seconds in seen.seconds)
    what = f"{count} towers, {seen.backend}: averaging 4 KB takes {small}, 32 MB {large}"
    if seen.right:
        yield ok(_SUBJECT, what)
    else:
        fix = "NCCL_ALGO, NCCL_PROTO and NCCL_P2P_DISABLE=1, one by one, tell what is broken; have the GPUs tested"
        yield problem(_SUBJECT, f"{what}, and the averages are wrong", fix)
