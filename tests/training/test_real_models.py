"""Models as people use them, on a last batch smaller than the number of towers: the numbers of one tower.

None of the language models takes an empty batch. They come from configurations, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import mirrored
from tests.support.jobs import assert_close, parameters_of, seeded, towers

WORDS, CLASSES, EXAMPLES, BATCH = 40, 3, 6, 4
"""The last batch has 2 examples, for 3 towers."""

SMALL: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": 16, "num_attention_heads": 2}
DEEP: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, **DEEP, num_key_value_heads=1))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
    return BertForSequenceClassification(BertConfig(**SMALL, **DEEP, **none))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=CLASSES))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**DEEP, **none, num_attention_heads=2, image_size=16, patch_size=8))


Batch = dict[str, Tensor]


def texts() -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    lengths = [3, 7, 2, 5, 4, 6][:EXAMPLES]
    words = [torch.randint(2, WORDS, (length,), generator=g) for length in lengths]
    return [{"input_ids": w, "labels": torch.tensor(i % CLASSES)} for i, w in enumerate(words)]


def images() -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randn(EXAMPLES, 3, 16, 16, generator=g, dtype=torch.float64)
    return [{"pixel_values": p, "labels": torch.tensor(i % CLASSES)} for i, p in enumerate(pixels)]


def pad(rows: list[Batch]) -> Batch:
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def classify(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses, right answers, and weights of the losses."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none"), logits.argmax(1) == batch["labels"], None


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """The next word at each place, of which padding does not count."""
    words = batch["input_ids"]
    if hasattr(model, "decoder"):
        logits = model(input_ids=words, attention_mask=batch["attention_mask"], labels=words).logits
    else:
        logits = model(input_ids=words, attention_mask=batch["attention_mask"]).logits[:, :-1]
        words = words[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), words, reduction="none", ignore_index=0)
    return losses, (logits.argmax(-1) == words) & (words > 0), (words > 0).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "GPT-2": (gpt2, predict),
    "Llama": (llama, predict),
    "T5": (t5, predict),
    "BERT": (bert, classify),
    "ResNet": (resnet, classify),
    "ViT": (vit, classify),
}


def trained(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Of every model: parameters after two epochs, global losses, and an evaluation in numbers."""
    results = {}
    for name, (make, outputs) in MODELS.items():
        with strategy.scope(sync_batch_norm=True):
            model = seeded(make).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        examples, collate = (texts(), pad) if name not in ("ResNet", "ViT") else (images(), None)
        data = strategy.distribute_dataset(examples, BATCH, collate_fn=collate, stand_in=True)

        def train(batch: Batch, model: Any = model, optimizer: Any = optimizer, outputs: Any = outputs) -> Tensor:
            optimizer.zero_grad()
            losses, _, weights = outputs(model, batch)
            kind = "examples" if weights is None else "weights"
            loss = mirrored.compute_average_loss(losses, weights, denominator=kind)
            loss.backward()
            optimizer.step()
            return loss.detach()

        @torch.no_grad()
        def test(batch: Batch, model: Any = model, outputs: Any = outputs) -> tuple[Tensor, Tensor, int]:
            losses, right, _ = outputs(model, batch)
            losses, right, labels = mirrored.drop_stand_in(losses, right, batch["labels"])
            return losses.sum(), right.sum(), len(labels)

        model.train()
        losses = [strategy.reduce("sum", strategy.run(train, args=(batch,))) for _ in range(2) for batch in data]
        model.eval()
        counted = [strategy.reduce("sum", strategy.run(test, args=(batch,))) for batch in data]
        buffers = [b.double() for b in model.buffers() if b.is_floating_point()]
        sums = [float(sum(column)) for column in zip(*counted, strict=True)]
        results[name] = parameters_of(model), buffers, losses, sums
    return results


def test_the_numbers_of_one_tower() -> None:
    alone = trained(mirrored.OneDeviceStrategy())
    for found in towers(trained, count=3):
        for name, (parameters, buffers, losses, sums) in alone.items():
            tolerance = 1e-6 if name in ("Llama", "T5") else 1e-9  # their norms compute in float32, whatever they get
            assert_close(found[name][0], parameters, tolerance)
            assert_close(found[name][1], buffers, tolerance)
            assert_close(found[name][2], losses, tolerance)
            assert found[name][3] == pytest.approx(sums, rel=tolerance), name
            assert sums[2] == EXAMPLES
