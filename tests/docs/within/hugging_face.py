"""A script that trains a small GPT-2; the lines of a document stand before its steps."""

from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

strategy = mirrored.MirroredStrategy(seed=0)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({word: i for i, word in enumerate("_abcdefg")})), pad_token="_"
)
config = GPT2Config(vocab_size=8, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
with strategy.scope():
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
texts = [{"input_ids": [1 + (i + j) % 7 for j in range(3 + i % 5)]} for i in range(20)]


def collate(rows):
    batch = tokenizer.pad(rows, return_tensors="pt")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


train = strategy.distribute_dataset(texts, 5, shuffle=True, collate_fn=collate)


def train_step(batch):
    optimizer.zero_grad()
    labels = batch.pop("labels")[:, 1:]
    losses = torch.nn.functional.cross_entropy(model(**batch).logits[:, :-1].transpose(1, 2), labels, reduction="none")
    mirrored.compute_average_loss(losses, sample_weight=labels != -100, denominator="weights").backward()
    optimizer.step()


# The document's lines come here.

model.train()
for batch in train:
    strategy.run(train_step, args=(batch,))
strategy.check_mirrored()
assert all(strategy.is_mirrored(parameter) for parameter in model.parameters())
