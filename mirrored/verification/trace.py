"""The trace of a script on one tower: the recording, in a form that can be sent between processes.

[Note: sketches] Tensors are not sent. A :class:`Sketch` contains a digest of the bits, the norm, a projection on random
signs and up to 256 values. The distance to another tensor can be estimated from them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import hashlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from towers.collectives.communicator import as_bytes
from towers.system import tree as trees
from towers.system.tensors import own_part, whole
from towers.system.torch_private import is_functorch_tensor

NUMBER_OF_TOWERS = ("num_replicas_in_sync", "WORLD_SIZE")
ONE_TOWER = ("is_chief", "topology.index", "replica_id_in_sync_group", "RANK")
SCOPE = ("scope",)
HASHES = ("a set or hash()",)

_SAMPLES = 256
_CHUNK = 2**20
_MOST_EXAMPLES = 4096


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A tensor summarised in a few numbers; see [Note: sketches].

    Attributes:
        digest: a digest of its bytes; equal digests mean equal bits.
        dtype: its dtype's name.
        numel: its number of elements.
        norm: its Euclidean norm, in float64.
        projection: its product with a fixed vector of random signs. The projection of a difference is as large as the
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
        """The root mean square of the elements."""
        return self.norm / math.sqrt(self.numel) if self.numel else 0.0

    def distance(self, other: Sketch, without: Collection[int] = ()) -> float:
        """Returns an estimate of the Euclidean distance: 0 for equal bits, infinite if numbers are not finite.

        Args:
            without: indices in the sample that do not count. The rest of the sample then represents all elements.
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
    """Returns whether a tensor's numbers can be read: not on the meta device or in a transform of ``torch.func``."""
    readable = not tensor.is_meta and not is_functorch_tensor(tensor)
    return readable and not is_lazy(tensor)


def memory_of(tensor: Tensor) -> int | None:
    """Returns the address of the memory that a tensor and its views share; None for tensors without dense memory."""
    own = own_part(tensor)
    return own.untyped_storage().data_ptr() if own.layout == torch.strided and has_values(own) else None


def digest_of(tensor: Tensor) -> str:
    """Returns a digest of a tensor's bits. The tensor can be dense, sparse or sharded, of any dtype, on any device."""
    return hashlib.blake2b(as_bytes(_on_host(tensor)).numpy().data, digest_size=16).hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    tensor = whole(tensor.detach())  # all towers record it
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu().contiguous()


def sketch(tensor: Tensor) -> Sketch:
    """Returns the sketch of a dense, sparse or sharded tensor of any dtype on any device."""
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
    """Returns the shape and a digest of every example of a batch.

    Example j consists of entry j of all tensors with as many entries as the first. In larger batches, only the first
    4,096 examples count.
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
    """Returns whether all :func:`example_digests` have one shape, so that equal examples have equal digests.

    They do not if each tower pads its share to its own longest example.
    """
    return len({example.split(":")[0] for batch in batches for example in batch}) <= 1


class Padding(NamedTuple):
    """The padding of a dimension, if it has one: before its entries or after them, and its number."""

    before: bool
    number: float


class Form(NamedTuple):
    """The shape and the paddings of a tensor of a batch.

    Attributes:
        shape: its shape.
        paddings: the padding of each dimension with at least two entries.
    """

    shape: tuple[int, ...]
    paddings: tuple[Padding | None, ...]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a nested value. The tensors in the arguments of ``run`` are numbered in this order."""
    return (leaf for leaf in trees.leaves(value) if isinstance(leaf, Tensor))


def form_of(tensor: Tensor) -> Form:
    """Returns the form of a tensor, without paddings if it has a single dimension or its layout is not dense."""
    tensor = tensor.detach()
    dense = tensor.layout == torch.strided and not tensor.is_complex() and tensor.dim() > 1 and tensor.numel()
    paddings = [_padding(tensor, d) if dense and tensor.shape[d] > 1 else None for d in range(tensor.dim())]
    return Form(tuple(tensor.shape), tuple(paddings))


def _padding(tensor: Tensor, dim: int) -> Padding:
    """Returns the padding of a dimension.

    Most examples are shorter than the longest, so they are padded with the most frequent number at an end. If all
    entries at an end are equal (in a mask), it has no padding.
    """
    ends = []
    for place in (0, -1):
        entries = tensor.select(dim, place).flatten().to("cpu", torch.float64)
        number = float(entries.mode().values)
        count = int((entries == number).sum())
        ends.append((count if count < len(entries) else 0, number))
    (firsts, first), (lasts, last) = ends
    return Padding(True, first) if firsts > lasts else Padding(False, last)


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a loss, from its autograd graph.

    Attributes:
        chain: the operations on it, from the loss inwards: ("divided by", 8), ("sum of", 4), …
        share: whether ``compute_average_loss`` or ``scale_regularization_loss`` created it.
        divisor: the total divisor of the sum of its values: their number, or the number of tokens that count.
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
        value: the loss, if known.
        terms: its summands.
        line: the script's line.
        share: the numbers of examples (this tower, all towers); (0, 0) if unknown.
    """

    value: float | None
    terms: tuple[Term, ...]
    line: int | None
    share: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers that were drawn in ``run``, or that a left-out dropout would have drawn.

    Attributes:
        by: the function.
        line: the script's line.
        state: a digest of the generator's state before.
        shape: the shape of the numbers.
        dropout: whether it was a dropout, which is left out.
        followed: whether this tower's slice of the global batch's numbers replaced them.
    """

    by: str
    line: int | None
    state: str
    shape: tuple[int, ...] = ()
    dropout: bool = False
    followed: bool = False


class Happened(enum.Enum):
    """What an :class:`Event` is, and what its ``what`` is."""

    WRITE = "a write to a parameter outside of steps: the parameter"
    CHANGE = "a change of a gradient outside of steps: the function (a hook will change it: register_hook)"
    DRAW = "random numbers that the script draws outside of run, after the first batch was loaded: the function"
    DRAW_ABOVE = "random numbers that are drawn above the strategy, in a run that looks for them"
    GATHER = "a call of the replica context that gathers examples in training: the method"
    GATHER_OF_CONSTANTS = "the same with values that have no gradient: the method"
    SERVERS = "the creation of a strategy whose numbers are not those of one device, which ended the script: its class"


@dataclasses.dataclass(frozen=True)
class Event:
    """An event outside of the optimizers' steps.

    Attributes:
        kind, what: see :class:`Happened`.
        line: the script's line.
        steps: the number of optimizer steps before.
        averaged: of a changed gradient, whether it was averaged before.
    """

    kind: Happened
    what: str
    line: int | None
    steps: int
    averaged: bool = False


@dataclasses.dataclass
class RunCall:
    """A call of ``strategy.run``.

    Attributes:
        steps: the number of optimizer steps before.
        examples: digests of the examples in its arguments.
        seen_by_model: digests of the examples in calls of the outermost modules.
        shares: the numbers of examples (this tower, all towers) in each distributed batch in its arguments.
        parameters: a digest of every known parameter at its start.
        draws: the random numbers that were drawn in it.
        trained: whether it called backward.
        forms: the forms of the tensors in its arguments.
        over_examples: where it computes one value from examples, as in :class:`Trace`.
        model_computes_loss: whether a model with parameters has returned a single number.
    """

    steps: int
    examples: list[str] = dataclasses.field(default_factory=list)
    seen_by_model: list[str] = dataclasses.field(default_factory=list)
    shares: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    parameters: dict[str, str] = dataclasses.field(default_factory=dict)
    draws: list[Draw] = dataclasses.field(default_factory=list)
    trained: bool = False
    forms: list[Form] = dataclasses.field(default_factory=list)
    over_examples: dict[tuple[int | None, str | None], int] = dataclasses.field(default_factory=dict)
    model_computes_loss: bool = False

    @property
    def examples_come_first(self) -> bool:
        """Whether the first dimension of the arguments is that of the examples, as far as this is known."""
        return not self.shares or self.shares[0][0] == len(self.examples)


Settings = dict[str, float | tuple[float, ...]]
"""Settings of an optimizer that are numbers, by name."""


@dataclasses.dataclass
class Step:
    """A step of an optimizer.

    Attributes:
        optimizer: its number in the order of first steps, and its class.
        line: the script's line.
        losses: the losses of the backwards since the previous step.
        gradients: the gradients before the step; None for a parameter without one.
        averaged: the gradients at the end of the last backward that averaged, where the parameter is a module's.
        before, after: digests of its parameters before the step, and their sketches after it.
        settings: the numbers among the settings of each parameter group ("lr" first, "weight_decay", "betas").
        schedules: the number of steps of each existing scheduler, by its class name and number.
        foreign: parameters with gradients that no scope mirrored.
        unsynced: parameters whose gradients have summands that were never averaged.
        batch_norms: layers that used only this tower's statistics since the previous step.
        buffers: sketches, after the step, of the buffers in the modules' ``state_dict``, without statistics that each
            tower computes separately.
        closure: whether the optimizer called a closure that calls backward.
    """

    optimizer: tuple[int, str]
    line: int | None
    losses: list[Loss]
    gradients: dict[str, Sketch | None]
    averaged: dict[str, Sketch]
    before: dict[str, str]
    settings: list[Settings]
    schedules: dict[str, int]
    foreign: list[str]
    unsynced: list[str]
    batch_norms: list[str]
    after: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    closure: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of ``strategy.reduce`` or ``strategy.gather``, or a value that a schedule is given.

    Attributes:
        call: its name in messages: "strategy.reduce('sum')", "ReduceLROnPlateau.step".
        line: the script's line.
        steps: the number of optimizer steps before.
        values: the first values of each tensor.
        dtypes: the dtype of each of these values.
        count: the total number of values.
    """

    call: str
    line: int | None
    steps: int
    values: tuple[float, ...]
    dtypes: tuple[str, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Printed:
    """A line on standard output, or of a file that the script writes.

    Attributes:
        text: the line.
        line: the script's line that ended it.
        steps: the number of optimizer steps before.
        file: the file, as the script names it. None: standard output.
    """

    text: str
    line: int | None
    steps: int
    file: str | None = None

    def output_of(self, number: str) -> str:
        """Returns how the chief has put out a number of this line, for messages."""
        return f"prints {number}" if self.file is None else f"writes {number} into {os.path.basename(self.file)}"


@dataclasses.dataclass(frozen=True)
class Raised:
    """The exception that ended the script.

    Attributes:
        consequence: whether it follows from another tower's end.
        batch_norm: the BatchNorm layer that could not normalise a share of one example.
    """

    kind: str
    text: str
    traceback: str
    line: int | None
    consequence: bool
    batch_norm: str | None = None

    def __str__(self) -> str:
        """Returns the first sentence of the exception."""
        return f"{self.kind}: {self.text.partition('. ')[0]}"


@dataclasses.dataclass
class End:
    """How the script ended without an exception.

    Attributes:
        line: its line that ended it (``sys.exit()``).
        by_verify: whether the recorder ended it, so that other towers that wait for this one fail.
        cut: whether a loop was ended early, because the last step to be compared was made.
        unevaluated: whether it was ended without an evaluation after the last step to be compared.
    """

    line: int | None = None
    by_verify: bool = False
    cut: bool = False
    unevaluated: bool = False


@dataclasses.dataclass
class Evaluated:
    """Calls of the outermost modules outside of training, after one step.

    Attributes:
        line: the script's line of the first one.
        examples: digests of the examples.
        models: digests of the parameters of each module, by its name.
    """

    line: int | None
    examples: list[str] = dataclasses.field(default_factory=list)
    models: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trace:
    """The recording of the script on one tower.

    Attributes:
        towers: the number of towers of the strategy whose ``run`` was called.
        virtual: whether that strategy has virtual towers, whose random numbers do not depend on the number of towers.
        autocast: whether modules were called under ``torch.autocast``.
        steps: the optimizers' steps.
        calls: the calls of ``strategy.run``.
        datasets: the number of examples of each distributed dataset, in the order of their first use.
        events: what happens outside of steps.
        evaluated: the calls of the outermost modules outside of training, by the number of steps before.
        results: the results of ``strategy.reduce`` and ``strategy.gather``.
        printed: the lines on standard output and in files.
        over_examples: the number of this tower's examples from which a line of the script computes one value in
            ``run``, by line and function; the function is None for a number for each pair of examples.
        left_out: the features that were left out: "dropout", "averaging"; and "seeds" if random numbers were drawn, or
            seeded, above the strategy.
        library: "keras" or "lightning" if the script uses :mod:`mirrored.keras` or :mod:`mirrored.lightning`.
        mentions: the lines of the script that contain a word that may explain a difference, by the word.
        lines: the lines that created parameters of optimizers and that last changed buffers, by name.
        raised: the exception that ended the script.
        end: how the script ended.
    """

    towers: int = 1
    virtual: bool = False
    autocast: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    calls: list[RunCall] = dataclasses.field(default_factory=list)
    datasets: list[int] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    evaluated: dict[int, Evaluated] = dataclasses.field(default_factory=dict)
    results: list[Result] = dataclasses.field(default_factory=list)
    printed: list[Printed] = dataclasses.field(default_factory=list)
    over_examples: dict[tuple[int | None, str | None], int] = dataclasses.field(default_factory=dict)
    left_out: set[str] = dataclasses.field(default_factory=set)
    library: str = ""
    mentions: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    lines: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    raised: Raised | None = None
    end: End = dataclasses.field(default_factory=End)

    def happened(self, kind: Happened) -> list[Event]:
        """Returns the events of a kind."""
        return [event for event in self.events if event.kind is kind]


def mentions_in(script: str) -> dict[str, list[int]]:
    """Returns the lines of a script with a word of NUMBER_OF_TOWERS, ONE_TOWER, SCOPE or HASHES, by the word."""
    mentions: dict[str, list[int]] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError), open(script, "rb") as file:
        for node in ast.walk(ast.parse(file.read())):
            word = _word_of(node)
            if word in (*NUMBER_OF_TOWERS, *ONE_TOWER, *SCOPE, *HASHES) and isinstance(node, ast.expr):
                mentions[word] = sorted({*mentions.get(word, ()), node.lineno})
    return mentions


def _word_of(node: ast.AST) -> str:
    match node:
        case ast.Set() | ast.SetComp() | ast.Name(id="set" | "frozenset" | "hash"):
            return HASHES[0]
        case ast.Attribute(value=ast.Attribute(attr=owner) | ast.Name(id=owner), attr="index"):
            return f"{owner}.index"
        case ast.Attribute(attr=word) | ast.Name(id=word) | ast.Constant(value=str(word)):
            return word
    return ""
