"""Trainings of Hugging Face's Trainer, run by ``launch`` on every tower: language models, classifiers, adapters."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import mirrored
import mirrored.transformers
from tests.support.jobs import Settings, strategy_of
from towers.system.tensors import whole

WORDS = ["[PAD]", "one", "two", "three", "four", "five", "six", "seven"]
TEXTS = [" ".join(WORDS[1 : 3 + (i * 5) % 7]) for i in range(18)]
_IGNORED = ("runtime", "per_second", "time", "flos")


def tokenizer() -> Any:
    vocabulary = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]")


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    return model.double()


def arguments(folder: str, **options: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "report_to": [],
        "learning_rate": 3e-3,
        "disable_tqdm": True,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **{**defaults, **options})


def right_tokens(predicted: Any) -> dict[str, float]:
    labels, guesses = predicted.label_ids[:, 1:], predicted.predictions.argmax(-1)[:, :-1]
    counts = labels != -100
    return {"right": float((guesses == labels)[counts].mean()), "tokens": int(counts.sum())}


def of_language_model(kind: type, folder: str, model: nn.Module | None = None, **options: Any) -> Any:
    words, own = (
        tokenizer(),
        {name: options.pop(name) for name in ("callbacks", "compute_loss_func") if name in options},
    )
    data = [words(text) for text in TEXTS]
    return kind(
        model or language_model(),
        arguments(folder, **options),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        train_dataset=data,
        eval_dataset=data[:11],
        compute_metrics=right_tokens,
        **own,
    )


def language(kind: type, folder: str) -> Any:
    return of_language_model(kind, folder)


def accumulated(kind: type, folder: str) -> Any:
    return of_language_model(kind, folder, gradient_accumulation_steps=2, label_smoothing_factor=0.1)


def own_loss(kind: type, folder: str) -> Any:
    """A loss function that is a mean, whatever the number of items."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return of_language_model(kind, folder, compute_loss_func=loss)


def own_step(kind: type, folder: str) -> Any:
    """A subclass with a loss that is a mean over tokens."""

    class Own(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return of_language_model(Own, folder)


def adapters(kind: type, folder: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = language_model()
    torch.manual_seed(1)
    return of_language_model(kind, folder, get_peft_model(model, LoraConfig(r=2, lora_alpha=4, fan_in_fan_out=True)))


def classes(count: int = 18) -> list[dict[str, Any]]:
    words = tokenizer()
    return [{**words(text), "labels": len(text.split()) % 3} for text in TEXTS[:count]]


def classifier(kind: type, folder: str) -> Any:
    """It returns a mean, though its forward takes any keyword. The best weights are loaded at the end."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, num_labels=3, **sizes, **drops)).double()

    def metrics(predicted: Any) -> dict[str, float]:
        return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1.0)
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "right"}
    return kind(
        model,
        arguments(folder, num_train_epochs=5, lr_scheduler_type="constant", **best),
        data_collator=DataCollatorWithPadding(tokenizer()),
        train_dataset=classes(),
        eval_dataset=classes(11),
        compute_metrics=metrics,
        callbacks=[stop],
    )


def regression(kind: type, folder: str) -> Any:
    """A plain module that returns its loss, and takes no number of items."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.line = nn.Linear(3, 1).double()

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            y = self.line(x).squeeze(-1)
            return {"loss": (y - labels).square().mean(), "logits": y}

    values = torch.randn(19, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [{"x": row[:3], "labels": row[3]} for row in values]
    options = {"gradient_accumulation_steps": 3, "learning_rate": 0.1}
    return kind(Line(), arguments(folder, **options), train_dataset=data, eval_dataset=data[:5])


def margins(kind: type, folder: str) -> Any:
    """A mean that is 0 in the first steps."""

    class Hinge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.line = nn.Linear(3, 1).double()

        def forward(self, x: Any, labels: Any = None, **others: Any) -> dict[str, Any]:
            y = self.line(x).squeeze(-1)
            return {"loss": (labels - y).relu().mean(), "logits": y}

    values = torch.randn(17, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [{"x": x, "labels": torch.tensor(-9.0 if number < 9 else 1.0)} for number, x in enumerate(values)]
    return kind(Hinge(), arguments(folder, train_sampling_strategy="sequential"), None, data, data[:5])


CASES: dict[str, Callable[[type, str], Any]] = {
    function.__name__: function
    for function in (language, accumulated, own_loss, own_step, adapters, classifier, regression, margins)
}


def fine_tuned(folder: str, alone: bool, shards: bool = False) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The logs and the weights of TRL's SFTTrainer; ``alone``: without ``mirrored``; ``shards``: of a sharded model."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class OnTowers(mirrored.transformers.OnTowers, SFTTrainer):  # type: ignore[misc]
        pass

    words = tokenizer()
    options = vars(arguments(folder, eval_strategy="no", bf16=False))
    names = ("per_device_train_batch_size", "num_train_epochs", "logging_steps", "report_to", "learning_rate")
    config = SFTConfig(folder, **{name: options[name] for name in names}, bf16=False, disable_tqdm=True, max_length=16)
    strategy = None if alone else mirrored.MirroredStrategy(seed=0)
    trainer: Any = (SFTTrainer if strategy is None else functools.partial(OnTowers, strategy=strategy))(
        model=strategy.shard(language_model()) if strategy is not None and shards else language_model(),
        args=config,
        train_dataset=Dataset.from_list([{"input_ids": words(text)["input_ids"]} for text in TEXTS]),
        processing_class=words,
    )
    trainer.train()
    return seen_logs(trainer), weights_of(trainer)


def seen_logs(trainer: Any) -> list[dict[str, float]]:
    return [
        {name: value for name, value in entry.items() if not any(each in name for each in _IGNORED)}
        for entry in trainer.state.log_history
    ]


def seen(trainer: Any) -> dict[str, Any]:
    """The logs, the weights and the predictions of a trainer."""
    history = seen_logs(trainer)
    predicted = trainer.predict(trainer.eval_dataset)
    weights = weights_of(trainer)
    return {
        "history": history,
        "weights": weights,
        "labels": predicted.label_ids,
        "loss": predicted.metrics["test_loss"],
    }


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    return {name: whole(value.detach()).numpy() for name, value in trainer.model.named_parameters()}


def results_of(kind: Any, folder: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results of cases with a kind of trainer."""
    results = {}
    for name in names:
        trainer = CASES[name](kind, f"{folder}/{name}")
        trainer.train()
        results[name] = seen(trainer)
    return results


def run_all(folder: str, alone: bool) -> dict[str, dict[str, Any]]:
    """The results of all cases, on every tower; ``alone``: by the Trainer of transformers."""
    kind = transformers.Trainer if alone else mirrored.transformers.Trainer
    return results_of(kind, folder, CASES)


def with_strategy(folder: str, settings: Settings, hosts: str) -> dict[str, dict[str, Any]]:
    """The results of some cases with a strategy of these settings; with a host for each tower."""
    if hosts:
        os.environ["NCCL_HOSTID"] = hosts[int(os.environ["RANK"])]
    kind: Any = functools.partial(mirrored.transformers.Trainer, strategy=strategy_of(settings))
    return results_of(kind, folder, ("accumulated", "classifier"))


def sharded(folder: str, hosts: str) -> dict[str, dict[str, Any]]:
    """The results of some cases with a sharded model; with a host for each tower."""
    if hosts:
        os.environ["NCCL_HOSTID"] = hosts[int(os.environ["RANK"])]
    strategy = mirrored.MirroredStrategy(seed=0)

    def kind(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mirrored.transformers.Trainer(strategy.shard(model), *args, strategy=strategy, **kwargs)

    return results_of(kind, folder, ("language", "accumulated", "own_loss", "adapters", "classifier"))


def resumed_by(folder: str, step: int | None, shard: bool) -> dict[str, np.ndarray]:
    """The weights of a run that saves every three steps, and resumes from the checkpoint of ``step``, if it has one."""
    strategy = mirrored.MirroredStrategy(seed=0)
    kind: Any = functools.partial(mirrored.transformers.Trainer, strategy=strategy)
    model = strategy.shard(language_model()) if shard else language_model()
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "eval_strategy": "no"}
    trainer = of_language_model(kind, folder, model, **options)
    trainer.train(None if step is None else f"{folder}/checkpoint-{step}")
    return weights_of(trainer)


def resumed(folder: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """Weights, with dropout, of a whole run, and of one that resumes in the middle of an epoch; the files."""
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "eval_strategy": "no"}
    weights = []
    for first in (True, False):
        trainer = of_language_model(mirrored.transformers.Trainer, folder, language_model(0.1), **options)
        trainer.train(None if first else f"{folder}/checkpoint-3")
        weights.append({name: value.detach().numpy() for name, value in trainer.model.named_parameters()})
    return weights[0], weights[1], sorted(path.name for path in pathlib.Path(folder, "checkpoint-3").iterdir())


def error_of(**options: Any) -> str:
    try:
        of_language_model(mirrored.transformers.Trainer, "results", **options)
    except ValueError as error:
        return str(error)
    return ""


def wrong_losses() -> list[str]:
    """The errors of losses that are no mean over examples: a sum, weighted classes, and a comparison of examples."""
    cross_entropy = nn.functional.cross_entropy
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    losses: list[Callable[[Any, Any], Any]] = [
        lambda logits, labels: cross_entropy(logits, labels, reduction="sum"),
        lambda logits, labels: cross_entropy(logits, labels, weight=weights),
        lambda logits, labels: (logits @ logits.T).logsumexp(1).mean(),
    ]
    found = []
    for loss in losses:

        def of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None, loss: Any = loss) -> Any:
            return loss(outputs["logits"], labels)

        trainer = classifier(functools.partial(mirrored.transformers.Trainer, compute_loss_func=of_outputs), "results")
        try:
            trainer.train()
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def without_arguments(folder: str) -> tuple[bool, str]:
    """Whether the second argument may be None, as that of ``transformers``."""
    os.chdir(folder)
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = mirrored.transformers.Trainer(language_model(), None, collate)
    return trainer.data_collator is collate, trainer.args.output_dir


def refused() -> list[str]:
    """The errors of settings that several towers do not support."""
    strategy = mirrored.MirroredStrategy(virtual_towers=4)
    try:
        mirrored.transformers.Trainer(language_model(), arguments("results"), strategy=strategy)
        virtual = ""
    except ValueError as error:
        virtual = str(error)
    return [
        virtual,
        error_of(batch_eval_metrics=True),
        error_of(include_for_metrics=["inputs"]),
        error_of(auto_find_batch_size=True),
    ]
