"""The trace of a script on one tower: what was recorded, in a form that travels between processes.

[Note: sketches] Tensors do not travel. A :class:`Sketch` holds a digest of the bits, the norm, a projection on random
signs and up to 256 values, from which the distance to another tensor can be estimated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mirrored.verification.padding import Form
from towers.collectives.communicator import as_bytes
from towers.system.torch_private import is_functorch_tensor

_SAMPLES = 256
_CHUNK = 2**20
_MOST_EXAMPLES = 4096


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers; see [Note: sketches].

    Attributes:
        digest: a digest of its bytes; equal digests are equal bits.
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

    @property
    def rms(self) -> float:
        """Root mean square of the elements."""
        return self.norm / math.sqrt(self.numel) if self.numel else 0.0

    def distance(self, other: Sketch, without: Collection[int] = ()) -> float:
        """An estimate of the Euclidean distance; 0 for equal bits, infinite where numbers are not finite.

        Args:
            without: indices in the sample that do not count; the rest of the sample then stands for all elements.
        """
        if self.digest == other.digest:
            return 0.0
        if self.numel != other.numel:
            return math.inf
        pairs = [pair for i, pair in enumerate(zip(self.sample, other.sample, strict=True)) if i not in without]
        estimates = [math.sqrt(sum((a - b) ** 2 for a, b in pairs) * self.numel / max(1, len(self.sample)))]
        if self.numel > len(self.sample) and not without:
            estimates += [abs(self.norm - other.norm), abs(self.projection - other.projection)]
        return max(estimate if math.isfinite(estimate) else math.inf for estimate in estimates)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read: not on the meta device, nor within a transform of ``torch.func``."""
    readable = not tensor.is_meta and not is_functorch_tensor(tensor)
    return readable and not is_lazy(tensor)


def memory_of(tensor: Tensor) -> int | None:
    """The address of the memory that a tensor and its views share; None for tensors without dense memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and has_values(tensor) else None


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's bits; it may be dense or sparse, of any dtype, on any device."""
    return hashlib.blake2b(as_bytes(_on_host(tensor)).numpy().data, digest_size=16).hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu().contiguous()


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of a dense or sparse tensor of any dtype on any device."""
    host = _on_host(tensor)
    flat = (torch.view_as_real(host) if host.is_complex() else host).reshape(-1)
    squares, projection = 0.0, 0.0
    for chunk in flat.split(_CHUNK):
        wide = chunk.to(torch.float64)
        signs = 1 - 2 * ((torch.arange(len(chunk), device=chunk.device) * 2654435761) >> 13 & 1)
        squares += float(wide @ wide)
        projection += float(wide @ signs.to(torch.float64))
    sample = flat[:: max(1, math.ceil(flat.numel() / _SAMPLES))].to(torch.float64)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Sketch(digest_of(host), dtype, flat.numel(), math.sqrt(squares), projection, tuple(sample.tolist()))


def example_digests(tensors: list[Tensor]) -> list[str]:
    """The shape and a digest of every example of a batch: entry j of all tensors with as many entries as the first.

    In larger batches the first 4,096 examples count.
    """
    tensors = [tensor.detach() for tensor in tensors if has_values(tensor) and tensor.layout == torch.strided]
    tensors = [tensor for tensor in tensors if tensor.dim() > 0]
    tensors = [tensor[:_MOST_EXAMPLES].cpu().contiguous() for tensor in tensors if len(tensor) == len(tensors[0])]
    shapes = " ".join(str(list(tensor.shape[1:])) for tensor in tensors)
    examples = []
    for j in range(len(tensors[0]) if tensors else 0):
        digest = hashlib.blake2b(digest_size=12)
        for tensor in tensors:
            digest.update(as_bytes(tensor[j]).numpy().data)
        examples.append(f"{shapes}: {digest.hexdigest()}")
    return examples


def comparable(*batches: Iterable[str]) -> bool:
    """Whether all :func:`example_digests` have one shape, so that equal examples have equal digests.

    They have not where each tower pads its share to its own longest example.
    """
    return len({example.split(":")[0] for batch in batches for example in batch}) <= 1


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a loss, as its autograd graph has it.

    Attributes:
        chain: from the loss inwards, what was done to it: ("divided by", 8), ("sum of", 4), …
        share: whether ``compute_average_loss`` or ``scale_regularization_loss`` made it.
        divisor: by what the sum of its values is divided altogether: their number, or that of the tokens that count.
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
        value: the loss, if it is known.
        terms: its summands.
        line: the script's line.
        share: how many examples (this tower, all towers) have; (0, 0) if unknown.
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
        line: the script's line.
        state: digest of the generator's state before.
        shape: the shape of what was drawn.
        dropout: whether it was a dropout, which is left out.
        followed: whether this tower's slice of the global batch's numbers replaced them.
    """

    by: str
    line: int | None
    state: str
    shape: tuple[int, ...] = ()
    dropout: bool = False
    followed: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened outside of the optimizers' steps.

    Attributes:
        what: the parameter that was written to, or the function that changed a gradient ("register_hook": a hook was
            registered that will).
        line: the script's line.
        steps: optimizer steps done before.
    """

    what: str
    line: int | None
    steps: int


@dataclasses.dataclass
class RunCall:
    """A call of ``strategy.run``.

    Attributes:
        steps: optimizer steps done before.
        examples: digests of the examples in its arguments.
        seen_by_model: digests of the examples that the outermost modules were called with.
        shares: how many examples (this tower, all towers) have in each distributed batch among its arguments.
        parameters: digest of every known parameter at its beginning.
        draws: the random numbers that were drawn in it.
        trained: whether it called backward.
        forms: what the tensors among its arguments look like.
    """

    steps: int
    examples: list[str] = dataclasses.field(default_factory=list)
    seen_by_model: list[str] = dataclasses.field(default_factory=list)
    shares: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    parameters: dict[str, str] = dataclasses.field(default_factory=dict)
    draws: list[Draw] = dataclasses.field(default_factory=list)
    trained: bool = False
    forms: list[Form] = dataclasses.field(default_factory=list)

    @property
    def examples_come_first(self) -> bool:
        """Whether the first dimension of the arguments is that of the examples, as far as that is known."""
        return not self.shares or self.shares[0][0] == len(self.examples)


@dataclasses.dataclass
class Step:
    """A step of an optimizer.

    Attributes:
        optimizer: its number in order of first steps, and its class.
        line: the script's line.
        losses: the losses of the backwards since the step before.
        gradients: before the step; None where there is none.
        before, after: digests of its parameters before, and their sketches after the step.
        rates: learning rate of each parameter group.
        schedules: how many steps each living scheduler has made, by its class name and number.
        foreign: parameters with gradients that no scope mirrored.
        unsynced: parameters whose gradients have summands that were never averaged.
        batch_norms: layers that took statistics of this tower alone since the last step.
        buffers: sketches, after the step, of the buffers in the modules' ``state_dict``, without statistics that each
            tower takes for itself.
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
    """What ``strategy.reduce`` or ``strategy.gather`` returned.

    Attributes:
        call: its name in messages: "strategy.reduce('sum')".
        line: the script's line.
        steps: optimizer steps done before.
        values: the first ones of each tensor.
        dtypes: the dtype of each of these values.
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
    """The exception that ended the script; a ``consequence`` of another tower's end, or not."""

    kind: str
    text: str
    traceback: str
    line: int | None
    consequence: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass
class Trace:
    """What was recorded of the script on one tower.

    Attributes:
        towers: how many towers the strategy has whose ``run`` was called.
        virtual: whether that strategy has virtual towers, with which random numbers do not depend on the towers.
        autocast: whether modules were called under ``torch.autocast``.
        steps: the optimizers' steps.
        calls: the calls of ``strategy.run``.
        datasets: how many examples each distributed dataset has, in the order of their first use.
        writes: what was written to parameters outside of steps.
        local_changes: changes of gradients that were not averaged yet.
        evaluated: digests of the examples that the outermost modules were called with outside of training, by the
            number of steps done before.
        evaluated_models: for each outermost module that was called outside of training, by the number of steps done
            before and its name: digests of its parameters.
        results: what ``strategy.reduce`` and ``strategy.gather`` returned.
        pairs: the lines of the script that make a number of each pair of this tower's examples in ``run``, and how many
            examples these are.
        left_out: what was left out: "dropout", "averaging".
        refused_by: the batch norm layer that could not normalise a share of one example.
        counts_towers: the lines of the script that name ``num_replicas_in_sync``.
        raised: the exception that ended the script.
        cut: whether a loop was ended early, because the last step to be compared was made.
        stopped: whether the script was ended early, and no evaluation came after the last step to be compared.
    """

    towers: int = 1
    virtual: bool = False
    autocast: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    calls: list[RunCall] = dataclasses.field(default_factory=list)
    datasets: list[int] = dataclasses.field(default_factory=list)
    writes: list[Event] = dataclasses.field(default_factory=list)
    local_changes: list[Event] = dataclasses.field(default_factory=list)
    evaluated: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    evaluated_models: dict[tuple[int, str], dict[str, str]] = dataclasses.field(default_factory=dict)
    results: list[Result] = dataclasses.field(default_factory=list)
    pairs: dict[int | None, int] = dataclasses.field(default_factory=dict)
    left_out: set[str] = dataclasses.field(default_factory=set)
    refused_by: str | None = None
    counts_towers: list[int] = dataclasses.field(default_factory=list)
    raised: Raised | None = None
    cut: bool = False
    stopped: bool = False
