"""Averaging gradients over the towers in every backward, beside it where the communicator can."""
