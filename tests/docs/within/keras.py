"""A script that trains a Keras model; the lines of a document make the model and the step."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras

strategy = mirrored.MirroredStrategy(seed=0)
inputs = torch.randn(100, 20)
train = strategy.distribute_dataset((inputs, F.relu(inputs)[:, :3].argmax(1)), 27, shuffle=True)

# The document's lines come here.

for batch in train:
    strategy.run(train_step, args=batch)
strategy.check_mirrored()
