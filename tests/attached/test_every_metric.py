"""Every metric and wrapper of the installed torchmetrics: the value of one tower on several, or an error that names it.

The last batch of 16 examples in batches of 4 is full, that of 19 has uneven shares on two towers, and that of 17 has
empty shares. Metrics are updated by ``update``, by ``forward`` and in a collection.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio
from torchmetrics.wrappers import (
    BinaryTargetTransformer,
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

import mirrored
from tests.support.jobs import towers

pytestmark = pytest.mark.extended

SIZES, BATCH = (16, 17, 19), 4
DOMAINS = (
    *("aggregation", "classification", "regression", "retrieval", "nominal", "clustering", "text", "image"),
    *("audio", "segmentation", "detection", "shape", "multimodal", "wrappers"),
)
LEFT_OUT = {
    "BaseAggregator": "a base class",
    "Metric": "a base class",
    "MetricInputTransformer": "a base class",
    "BERTScore": "downloads a model",
    "InfoLM": "downloads a model",
    "CLIPScore": "downloads a model",
    "CLIPImageQualityAssessment": "downloads a model",
    "ClusterAccuracy": "needs torch_linear_assignment",
    "DeepImageStructureAndTextureSimilarity": "downloads a model",
    "MemorizationInformedFrechetInceptionDistance": "downloads a model",
}
REFUSED = {"NormalizedRootMeanSquaredError", "BinaryFairness", "BinaryGroupStatRates", "MultilabelRankingLoss"}
"""The first one always, the others if their value depends on the shares."""
NEEDING_EXAMPLES = {
    *("BinaryLogAUC", "MulticlassLogAUC", "MultilabelLogAUC", "CalinskiHarabaszScore", "DaviesBouldinScore"),
    *("DunnIndex", "R2Score"),
}
"""By ``forward``, they have no value for one example or one class: an error on one tower, too, with such a batch."""
RANDOM = {"BootStrapper"}
WORDS = ("a", "small", "dog", "and", "the", "old", "cat", "sat", "on", "mat", "while", "rain", "fell", "over", "hills")


def examples(kind: str, count: int) -> tuple[Any, ...]:
    """The columns of a kind of input, for as many examples."""
    g = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=g, dtype=torch.float64)

    def choice(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (count, *shape), generator=g)

    def text() -> list[str]:
        return [" ".join(WORDS[(5 * i + 3 * j) % len(WORDS)] for j in range(4 + i % 3)) for i in range(count)]

    def changed(texts: list[str]) -> list[str]:
        return [t.replace("cat", "dog") if i % 2 else t for i, t in enumerate(texts)]

    match kind:
        case "numbers":
            return (rand(),)
        case "binary":
            return rand(), choice(2)
        case "groups":
            return rand(), choice(2), torch.arange(count) % 2
        case "multiclass":
            return rand(3).softmax(1), choice(3)
        case "sets":
            return choice(3, 5), choice(3, 5)
        case "multilabel":
            return rand(3), choice(2, 3)
        case "positive":
            return rand() + 0.5, rand() + 0.5
        case "ensembles":
            return rand(4), rand()
        case "vectors":
            return rand(4).softmax(1), rand(4).softmax(1)
        case "retrieval":
            return rand(), choice(2), torch.arange(count) // 5
        case "labels":
            return choice(3), choice(3)
        case "ratings":
            first = choice(3)
            return (torch.stack([first, 2 - first, torch.full((count,), 2)], 1),)
        case "points":
            return rand(2) + 3 * (torch.arange(count) % 3)[:, None], torch.arange(count) % 3
        case "texts":
            return changed(text()), text()
        case "references":
            return changed(text()), [[each] for each in text()]
        case "answers":
            pairs = list(enumerate(zip(changed(text()), text(), strict=True)))
            asked = [{"prediction_text": answer, "id": str(i)} for i, (answer, _) in pairs]
            return asked, [{"answers": {"answer_start": [0], "text": [right]}, "id": str(i)} for i, (_, right) in pairs]
        case "tokens":
            return rand(5, 7).softmax(2), choice(7, 5)
        case "image":
            return (rand(3, 24, 24),)
        case "images" | "gray images":
            channels, size = (3, 24) if kind == "images" else (1, 48)
            first = rand(channels, size, size)
            return first, (first + 0.1 * rand(channels, size, size)).clamp(0, 1)
        case "bands":
            return rand(3, 32, 32), {"ms": rand(3, 16, 16), "pan": rand(3, 32, 32), "pan_lr": rand(3, 16, 16)}
        case "signals":
            return rand(600) - 0.5, rand(600) - 0.5
        case "spectra":
            return rand(9, 7, 2), rand(9, 7, 2)
        case "speakers":
            return rand(2, 100) - 0.5, rand(2, 100) - 0.5
        case "masks":
            hot = functools.partial(torch.nn.functional.one_hot, num_classes=3)
            return hot(choice(3, 8, 8)).movedim(3, 1), hot(choice(3, 8, 8)).movedim(3, 1)
        case "panoptic":
            return torch.stack([choice(3, 8, 8), choice(2, 8, 8)], 3), torch.stack(
                [choice(3, 8, 8), choice(2, 8, 8)], 3
            )
        case "clouds":
            return rand(6, 3), rand(6, 3)
        case "faces":
            return rand(5, 3), rand(5, 3)
        case "tasks":
            return {"a": rand(), "b": rand()}, {"a": choice(2), "b": rand()}
    raise ValueError(kind)


SETTINGS: dict[str, dict[str, Any]] = {
    "FBeta": {"beta": 0.5},
    "Fairness": {"num_groups": 2},
    "GroupStatRates": {"num_groups": 2},
    "AtFixedRecall": {"min_recall": 0.5},
    "AtFixedPrecision": {"min_precision": 0.5},
    "AtSpecificity": {"min_specificity": 0.5},
    "AtSensitivity": {"min_sensitivity": 0.5},
    "CriticalSuccessIndex": {"threshold": 0.8},
    "MinkowskiDistance": {"p": 3},
    "RetrievalRecallAtFixedPrecision": {"min_precision": 0.3, "max_k": 3},
    "CramersV": {"num_classes": 3},
    "PearsonsContingencyCoefficient": {"num_classes": 3},
    "TheilsU": {"num_classes": 3},
    "TschuprowsT": {"num_classes": 3},
    "PeakSignalNoiseRatio": {"data_range": 1.0},
    "PermutationInvariantTraining": {"metric_func": scale_invariant_signal_noise_ratio},
    "MultiScaleStructural": {"betas": (0.5, 0.5), "kernel_size": 5},
    "DiceScore": {"num_classes": 3},
    "MeanIoU": {"num_classes": 3},
    "HausdorffDistance": {"num_classes": 3, "input_format": "one-hot"},
    "PanopticQuality": {"things": {0, 1}, "stuffs": {2}},
    "LipVertexError": {"mouth_map": [0, 2]},
}
"""Arguments of the metrics whose names contain a key."""

KINDS = {
    "aggregation": "numbers",
    "regression": "positive",
    "retrieval": "retrieval",
    "nominal": "labels",
    "clustering": "labels",
    "text": "texts",
    "image": "images",
    "audio": "signals",
    "segmentation": "masks",
    "detection": "panoptic",
    "shape": "clouds",
    "multimodal": "faces",
}
OTHER_KINDS = {
    "Fairness": "groups",
    "GroupStatRates": "groups",
    "MulticlassExactMatch": "sets",
    "ContinuousRankedProbabilityScore": "ensembles",
    "CosineSimilarity": "vectors",
    "JensenShannonDivergence": "vectors",
    "KLDivergence": "vectors",
    "FleissKappa": "ratings",
    "CalinskiHarabaszScore": "points",
    "DaviesBouldinScore": "points",
    "DunnIndex": "points",
    "BLEUScore": "references",
    "CHRFScore": "references",
    "TranslationEditRate": "references",
    "SQuAD": "answers",
    "Perplexity": "tokens",
    "TotalVariation": "image",
    "PeakSignalNoiseRatioWithBlockedEffect": "gray images",
    "VisualInformationFidelity": "gray images",
    "QualityWithNoReference": "bands",
    "SpatialDistortionIndex": "bands",
    "ComplexScaleInvariantSignalNoiseRatio": "spectra",
    "PermutationInvariantTraining": "speakers",
    "SourceAggregatedSignalDistortionRatio": "speakers",
}

WRAPPERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "BinaryTargetTransformer": ("positive", lambda: BinaryTargetTransformer(torchmetrics.MeanMetric(), 0.8)),
    "BootStrapper": ("positive", lambda: BootStrapper(torchmetrics.MeanSquaredError(), num_bootstraps=3)),
    "ClasswiseWrapper": (
        "multiclass",
        lambda: ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(3, average=None)),
    ),
    "LambdaInputTransformer": (
        "positive",
        lambda: LambdaInputTransformer(torchmetrics.MeanSquaredError(), transform_pred=torch.log),
    ),
    "MinMaxMetric": ("positive", lambda: MinMaxMetric(torchmetrics.MeanSquaredError())),
    "MultioutputWrapper": ("vectors", lambda: MultioutputWrapper(torchmetrics.MeanSquaredError(), 4)),
    "MultitaskWrapper": (
        "tasks",
        lambda: MultitaskWrapper(
            {"a": torchmetrics.classification.BinaryAccuracy(), "b": torchmetrics.MeanSquaredError()}
        ),
    ),
    "Running": ("positive", lambda: Running(torchmetrics.MeanSquaredError(), window=2)),
}


def metrics_of(domain: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The metrics of a domain: name, kind of input, and a function that makes it."""
    module = importlib.import_module(f"torchmetrics.{domain}")
    for name in sorted({*getattr(module, "__all__", ()), *dir(module)}):
        made = getattr(module, name, None)
        if not inspect.isclass(made) or not issubclass(made, torchmetrics.Metric) or name in LEFT_OUT:
            continue
        if name in WRAPPERS:
            if domain == "wrappers":
                yield name, *WRAPPERS[name]
            continue
        if domain == "classification" and not name.startswith(("Binary", "Multiclass", "Multilabel")):
            continue  # makes one of these
        settings = {key: value for part, values in SETTINGS.items() if part in name for key, value in values.items()}
        kind = next((kind for part, kind in OTHER_KINDS.items() if part in name), KINDS.get(domain, ""))
        if domain == "classification" and not kind:
            kind = next(task for task in ("binary", "multiclass", "multilabel") if name.lower().startswith(task))
        if name == "SignalDistortionRatio":
            settings["filter_length"] = 8
        if name.startswith("Multiclass"):
            settings["num_classes"] = 3
        if name.startswith("Multilabel"):
            settings["num_labels"] = 3
        if name == "ROUGEScore":
            settings["rouge_keys"] = ("rouge1", "rougeL")
        yield name, kind, functools.partial(made, **settings)


def collate(batch: list[Any]) -> tuple[Any, ...]:
    """Tensors are stacked; texts and answers stay lists."""

    def column(values: list[Any]) -> Any:
        if isinstance(values[0], dict) and not isinstance(next(iter(values[0].values())), (str, dict)):
            return {key: torch.stack([value[key] for value in values]) for key in values[0]}
        return torch.stack(values) if isinstance(values[0], Tensor) else list(values)

    return tuple(column(list(values)) for values in zip(*batch, strict=True))


def plain(value: Any) -> Any:
    """A metric's value as nested lists of numbers."""
    if isinstance(value, Tensor):
        return value.double().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def value_of(strategy: mirrored.Strategy, metric: Any, data: list[Any], calls: bool) -> Any:
    """A metric's value after an epoch, or the first error as text."""
    problem: list[str] = []

    def step(*batch: Any) -> None:
        try:
            (metric if calls else metric.update)(*batch)
        except Exception as error:
            problem.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    for batch in strategy.distribute_dataset(data, BATCH, collate_fn=collate):
        strategy.run(step, args=tuple(batch))
    if strategy.reduce("max", len(problem)):
        return problem[0] if problem else "an error on another tower"
    try:
        return plain(metric.compute())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def results(strategy: mirrored.Strategy, way: str) -> dict[tuple[str, int], Any]:
    """The values of all metrics, or of collections of those with one kind of input, by name and number of examples."""
    warnings.simplefilter("ignore")
    metrics = [each for domain in DOMAINS for each in metrics_of(domain)]
    if way == "collection":
        kinds: dict[str, dict[str, Callable[[], Any]]] = {}
        for name, kind, make in metrics:
            if name not in WRAPPERS and name not in REFUSED:
                kinds.setdefault(kind, {})[name] = make
        metrics = [
            (f"the collection of {kind}", kind, functools.partial(collected, own)) for kind, own in kinds.items()
        ]
    found: dict[tuple[str, int], Any] = {}
    for name, kind, make in metrics:
        for size in SIZES:
            data = list(zip(*(_rows(column) for column in examples(kind, size)), strict=True))
            try:
                metric = strategy.mirror(make())
            except ValueError as error:
                found[name, size] = str(error)
            else:
                found[name, size] = value_of(strategy, metric, data, way == "forward")
    return found


def collected(metrics: dict[str, Callable[[], Any]]) -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection({name: make() for name, make in metrics.items()})


def _rows(column: Any) -> list[Any]:
    if isinstance(column, dict):
        columns = {key: list(value) for key, value in column.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return list(column)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[k], expected[k]) for k in found)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    return math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(found) and math.isnan(expected))


@pytest.mark.parametrize("way", ["update", "forward", "collection"])
def test_every_metric_has_the_value_of_one_tower_or_is_refused_by_name(way: str) -> None:
    [alone] = towers(results, way, count=1)
    for count in (2, 3):
        several = towers(results, way, count=count)
        refused = set()
        for place, expected in alone.items():
            name, found = place[0], [tower[place] for tower in several]
            if any(isinstance(value, str) for value in found):
                assert any(name in value for value in found if isinstance(value, str)), (count, place, found)
                refused.add(name)
            else:
                wanted = found[0] if name in RANDOM else expected
                assert all(same(value, wanted) for value in found), (count, place, found, expected)
        assert refused == {"update": REFUSED, "forward": REFUSED | NEEDING_EXAMPLES, "collection": set()}[way], count


def test_every_metric_is_tried() -> None:
    """Except those with a reason."""
    tried = {name for domain in DOMAINS for name, _, _ in metrics_of(domain)}
    assert len(tried) >= 188  # of torchmetrics 1.9
