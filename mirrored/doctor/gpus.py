"""Checks the machine's GPUs, and whether torch can use them."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterator, Mapping

import torch

from mirrored.doctor.findings import Finding, note, ok, problem, warning
from towers.system import accelerator, devices

_SUBJECT = "GPUs"
_DEV = pathlib.Path("/dev")


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether torch finds the GPUs, their names and memory, and a computation on each."""
    if (kind := devices.accelerator_kind()) not in ("cpu", "cuda"):
        names = {accelerator.name(torch.device(kind, number)) for number in range(devices.count_of(kind))}
        yield ok(_SUBJECT, f"{devices.count_of(kind)} of kind {kind!r} ({', '.join(sorted(names))}): not looked into")
        return
    cause, _, fix = str(accelerator.missing_tpu()).partition(": ")
    tpu_host = any(_DEV.glob("vfio/[0-9]*"))
    if tpu_host or "not installed" not in cause:
        expected = "TPU_SKIP_MDS_QUERY" in environ and not tpu_host
        yield (note if expected else warning)("TPUs", cause, fix)
    present, hidden = _on_machine(), environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        severe = warning if present else note
        yield severe(
            "CUDA_VISIBLE_DEVICES",
            f"is {hidden!r}, which hides all GPUs: towers run on the CPU",
            "unset CUDA_VISIBLE_DEVICES, unless that is on purpose",
        )
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    built = f"torch {torch.version.__version__} {f'for CUDA {cuda}' if cuda else 'built without CUDA'}"
    if count == 0:
        if present:
            reason = str(caught[0].message).split("(Triggered")[0] if caught else "torch finds none"
            fix = (
                "install a driver that fits torch's CUDA, or a torch that fits the driver (python -m "
                "torch.utils.collect_env prints both); start a container with GPUs (--gpus all)"
            )
            if cuda is None:
                fix = "install a CUDA build of torch: https://pytorch.org/get-started"
            yield problem(_SUBJECT, f"{present}, {built}: {reason}", fix)
        elif hidden is not None and cuda is not None:
            yield warning(
                "CUDA_VISIBLE_DEVICES",
                f"is {hidden!r}, but torch finds no GPU: towers run on the CPU",
                "unset CUDA_VISIBLE_DEVICES, or give this container the machine's GPUs",
            )
        else:
            yield ok(_SUBJECT, f"no NVIDIA GPU here: towers run on the CPU ({built})")
        return
    yield ok(_SUBJECT, f"{count}, {built}")
    for number in range(count):
        yield _try(number)


def _on_machine() -> str:
    """Returns the GPUs that the kernel lists, in words, independently of torch and CUDA; "" if there are none."""
    files = [entry.name for entry in _DEV.glob("nvidia[0-9]*")]
    return f"{len(files)} NVIDIA GPU{'s' if len(files) > 1 else ''}" if files else ""


def _try(number: int) -> Finding:
    """Multiplies matrices on one GPU, and checks the known result."""
    device, subject = torch.device("cuda", number), f"cuda:{number}"
    try:
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        free, size = torch.cuda.mem_get_info(device)
        ones = torch.ones(256, 256, device=device)
        correct = bool(((ones @ ones) == 256).all())
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return problem(subject, f"cannot be used: {first}", f"see nvidia-smi -i {number}: is it free and healthy?")
    what = (
        f"{name}, compute capability {capability[0]}.{capability[1]}, {free / 2**30:.0f} of {size / 2**30:.0f} GB free"
    )
    if not correct:
        return problem(
            subject,
            f"{what}: it computes wrong results",
            f"leave it out, and have it tested: nvidia-smi -q -i {number}",
        )
    if free < 0.5 * size:
        return warning(subject, f"{what}: another program uses it", "nvidia-smi names it; end it, or choose other GPUs")
    return ok(subject, what)
