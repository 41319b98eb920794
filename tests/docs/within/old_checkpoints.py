"""A model, and files of another whose names begin with ``module.``; the lines of a document load one of them."""

from safetensors.torch import save_file

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Linear(4, 2)
old = {"module.weight": torch.arange(8.0).view(2, 4), "module.bias": torch.ones(2)}
if strategy.is_chief:
    save_file(old, "old.safetensors")
    torch.save(old, "old.pt")
strategy.barrier()

# The document's lines come here.

assert torch.equal(strategy.run(lambda: model.weight), old["module.weight"].to(strategy.device))
