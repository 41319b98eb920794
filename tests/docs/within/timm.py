"""A script with images; the lines of a document make a model and train it."""

strategy = mirrored.MirroredStrategy(seed=0)
images = torch.randn(19, 1, 32, 32)
train = strategy.distribute_dataset((images, torch.arange(19) % 3), 8, shuffle=True)

# The document's lines come here.

strategy.check_mirrored()
