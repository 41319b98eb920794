"""Averages gradients over the towers in every backward, in parallel with it if the communicator can."""
