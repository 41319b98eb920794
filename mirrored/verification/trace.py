"""What was seen of a script on one tower, in a form that travels between processes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from towers.collectives.communicator import as_bytes
from towers.system.torch_private import is_functorch_tensor

_SAMPLES = 256
_PIECE = 2**20
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers, from which the distance to another one can be estimated.

    Attributes:
        digest: of its bytes; equal digests are equal bits.
        dtype: its dtype's name.
        numel: how many elements it has.
        norm: Euclidean norm, in float64.
        projection: its product with a fixed vector of random signs. That of a difference is as large as the
            difference's norm, up to a factor near 1.
        sample: up to 256 evenly spaced values.
    """

    digest: str
    dtype: str
    numel: int
    norm: float
    projection: float
    sample: tuple[float, ...]

    def distance(self, other: Sketch, without: Collection[int] = ()) -> float:
        """An estimate of the Euclidean distance; 0 for equal bits, infinite where numbers are not finite.

        Args:
            without: places in the sample that do not count; the rest of the sample then speaks for all.
        """
        if self.digest == other.digest:
            return 0.0
        if self.numel != other.numel:
            return math.inf
        pairs = [pair for i, pair in enumerate(zip(self.sample, other.sample, strict=True)) if i not in without]
        parts = [math.sqrt(sum((a - b) ** 2 for a, b in pairs) * self.numel / max(1, len(self.sample)))]
        if self.numel > len(self.sample) and not without:
            parts += [abs(self.norm - other.norm), abs(self.projection - other.projection)]
        return max(part if math.isfinite(part) else math.inf for part in parts)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read: not on the meta device, nor within a transform of ``torch.func``."""
    held = not tensor.is_meta and not is_functorch_tensor(tensor)
    return held and not is_lazy(tensor)


def bits(tensor: Tensor) -> str:
    """A digest of a tensor's bits; it may be dense or sparse, of any dtype, on any device."""
    return hashlib.blake2b(as_bytes(_on_host(tensor)).numpy().data, digest_size=16).hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    held = held.to_dense() if held.layout != torch.strided else held
    return held.cpu().contiguous()


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of a dense or sparse tensor of any dtype on any device."""
    held = _on_host(tensor)
    flat = (torch.view_as_real(held) if held.is_complex() else held).reshape(-1)
    squares, projection = 0.0, 0.0
    for part in flat.split(_PIECE):
        wide = part.to(torch.float64)
        signs = 1 - 2 * ((torch.arange(len(part), device=part.device) * 2654435761) >> 13 & 1)
        squares += float(wide @ wide)
        projection += float(wide @ signs.to(torch.float64))
    step = max(1, math.ceil(flat.numel() / _SAMPLES))
    return Sketch(
        bits(held),
        str(tensor.dtype).removeprefix("torch."),
        flat.numel(),
        math.sqrt(squares),
        projection,
        tuple(flat[::step].to(torch.float64).tolist()),
    )


def rows(tensors: list[Tensor]) -> list[str]:
    """For every example of a batch its shape and a digest: entry j of all tensors with as many entries as the first.

    Batches of more than 4,096 examples are looked at up to there.
    """
    tensors = [tensor.detach() for tensor in tensors if has_values(tensor) and tensor.layout == torch.strided]
    tensors = [tensor for tensor in tensors if tensor.dim() > 0]
    tensors = [tensor[:_ROWS].cpu().contiguous() for tensor in tensors if len(tensor) == len(tensors[0])]
    form = " ".join(str(list(tensor.shape[1:])) for tensor in tensors)
    found = []
    for j in range(len(tensors[0]) if tensors else 0):
        digest = hashlib.blake2b(digest_size=12)
        for tensor in tensors:
            digest.update(as_bytes(tensor[j]).numpy().data)
        found.append(f"{form}: {digest.hexdigest()}")
    return found


def comparable(*batches: Iterable[str]) -> bool:
    """Whether the examples of several :func:`rows` have one shape, so that equal ones have equal digests.

    Each tower may pad its share to its own longest example.
    """
    return len({example.split(":")[0] for batch in batches for example in batch}) <= 1


class Ends(NamedTuple):
    """The most frequent number at each end of a dimension, how many entries there have it, and how many there are."""

    first: float
    firsts: int
    last: float
    lasts: int
    entries: int

    @property
    def padding_is_first(self) -> bool:
        """Whether padding is at the first end: at the other, all entries of a mask are alike, for none is padding."""
        firsts, lasts = (count if count < self.entries else 0 for count in (self.firsts, self.lasts))
        return firsts > lasts


class Form(NamedTuple):
    """What a tensor of a batch looks like.

    Attributes:
        shape: its shape.
        ends: of each dimension but of those with less than two entries: most examples are shorter than the longest,
            so the most frequent number at an end is what they are padded with.
    """

    shape: tuple[int, ...]
    ends: tuple[Ends | None, ...]


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a loss, as its autograd graph has it.

    Attributes:
        chain: from the loss inwards, what was done to it: ("divided by", 8), ("sum of", 4), …
        share: whether ``compute_average_loss`` or ``scale_regularization_loss`` made it.
        divisor: by what the sum of its values is divided altogether: their number, that of the tokens which count.
    """

    chain: tuple[tuple[str, float], ...]
    share: bool
    divisor: float = 1.0

    def __str__(self) -> str:
        *outer, (what, count) = self.chain
        inner = f"the {what} {count:g} values" if count else "a value"
        return ", ".join([inner, *(f"{how} {factor:g}" for how, factor in reversed(outer))])


@dataclasses.dataclass(frozen=True)
class Loss:
    """A call of ``backward``.

    Attributes:
        value: of the loss, if it is known.
        terms: what it is made of.
        line: of the script.
        share: (this tower's, all towers') examples; (0, 0) where that is not known.
    """

    value: float | None
    terms: tuple[Term, ...]
    line: int | None
    share: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that were drawn in ``run``, or would have been by a dropout that was left out.

    Attributes:
        by: the function.
        state: digest of the generator's state before.
        examples: the first dimension of what was drawn.
        dropout: whether it was a dropout, which is left out.
        followed: whether the numbers were replaced by this tower's part of those of the global batch.
        shape: of what was drawn.
    """

    by: str
    line: int | None
    state: str
    examples: int
    dropout: bool = False
    followed: bool = False
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Write:
    """A parameter was written to outside of an optimizer's step."""

    parameter: str
    line: int | None
    steps: int


@dataclasses.dataclass
class Run:
    """A call of ``strategy.run``.

    Attributes:
        steps: optimizer steps done before.
        given: the examples in its arguments, as :func:`rows` tells them.
        fed: the examples that the outermost modules were called with.
        shares: (this tower's, all towers') examples of the distributed batches among its arguments.
        entered: digest of every known parameter's bits at its beginning.
        trained: whether it called backward.
        forms: of the tensors among its arguments.
    """

    steps: int
    given: list[str] = dataclasses.field(default_factory=list)
    fed: list[str] = dataclasses.field(default_factory=list)
    shares: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    entered: dict[str, str] = dataclasses.field(default_factory=dict)
    draws: list[Draw] = dataclasses.field(default_factory=list)
    trained: bool = False
    forms: list[Form] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class LocalChange:
    """Something is done to a gradient that is one tower's own, before it is averaged.

    Attributes:
        by: the function; "register_hook" for a hook that autograd will call.
        steps: done before.
    """

    by: str
    line: int | None
    steps: int


@dataclasses.dataclass
class Step:
    """A step of an optimizer.

    Attributes:
        optimizer: its number in order of first steps, and its class.
        gradients: before the step; None where there is none.
        before, after: digests of its parameters' bits before, and their sketches after the step.
        rates: learning rate of each parameter group.
        schedules: of each living scheduler, by class name and number, how many steps it has made.
        foreign: parameters with gradients that no scope mirrored.
        unsynced: parameters whose gradients hold parts that were never averaged.
        batch_norms: layers that took statistics of this tower alone since the last step.
        buffers: sketches after the step of what modules hold in their ``state_dict`` beside parameters, but for
            statistics that each tower takes for itself, as batch norm does.
    """

    optimizer: tuple[int, str]
    line: int | None
    losses: list[Loss]
    gradients: dict[str, Sketch | None]
    before: dict[str, str]
    rates: list[float]
    schedules: dict[str, int]
    foreign: list[str]
    unsynced: list[str]
    batch_norms: list[str]
    after: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Sketch] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """What ``strategy.reduce`` or ``strategy.gather`` returned, with the steps done before.

    Attributes:
        values: the first ones of each tensor.
        dtypes: of each of these values.
        count: how many values there are altogether.
    """

    call: str
    line: int | None
    steps: int
    values: tuple[float, ...]
    dtypes: tuple[str, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Raised:
    """The exception that ended the script."""

    kind: str
    text: str
    traceback: str
    line: int | None
    consequence: bool


@dataclasses.dataclass
class Seen:
    """All that was seen of the script on one tower.

    Attributes:
        towers: of the strategy whose ``run`` was called.
        virtual: whether that strategy has virtual towers, with which random numbers do not depend on the towers.
        autocast: whether modules were called under ``torch.autocast``.
        datasets: examples of each distributed dataset, in the order in which they were first used.
        evaluated: the examples that the outermost modules were called with outside of training, by the number of
            steps done before.
        dropouts: how many calls of a dropout were left out.
        refused_by: the batch norm layer that could not normalise a share of one example.
        counted: the lines of the script that name ``num_replicas_in_sync``.
        cut: whether a loop was ended before its time, because the last step to be compared was made.
        stopped: whether the script was ended before its time, and no evaluation came after the last step compared.
        evaluated_models: for each outermost module that was called outside of training, by its name and the number of
            steps done before: digests of its parameters' bits.
        local_changes: to gradients that were not averaged yet.
    """

    towers: int = 1
    virtual: bool = False
    autocast: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    datasets: list[int] = dataclasses.field(default_factory=list)
    writes: list[Write] = dataclasses.field(default_factory=list)
    evaluated: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    results: list[Result] = dataclasses.field(default_factory=list)
    dropouts: int = 0
    refused_by: str | None = None
    counted: list[int] = dataclasses.field(default_factory=list)
    raised: Raised | None = None
    cut: bool = False
    stopped: bool = False
    evaluated_models: dict[tuple[int, str], dict[str, str]] = dataclasses.field(default_factory=dict)
    local_changes: list[LocalChange] = dataclasses.field(default_factory=list)
