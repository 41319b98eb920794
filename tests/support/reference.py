"""What collectives are compared with: the same values added up in a fixed order on one tower."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def random_tensor(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32  # which is quicker
        return torch.randn(shape, generator=generator, dtype=drawn).to(dtype)
    return torch.randint(0, 7, shape, generator=generator).to(dtype)


def fixed_order(parts: list[Tensor], op: str) -> Tensor:
    """The reduction from tower 0 to the last, in the widest precision."""
    combine = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
    wide = [part.to(torch.complex128 if part.is_complex() else torch.float64) for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = combine(total, part)
    return total


def agrees(found: Tensor, expected: Tensor, terms: int) -> bool:
    if not (found.is_floating_point() or found.is_complex()):
        return bool(torch.equal(found, expected.to(torch.int64).to(found.dtype)))
    wide = found.to(expected.dtype)
    rounding = terms * torch.finfo(found.dtype).eps * (expected.abs() + terms)
    return bool(((wide - expected).abs() <= rounding).all())
