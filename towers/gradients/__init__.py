"""Averaging gradients over the towers while backward is still running."""
