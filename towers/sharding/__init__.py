"""Optimizers whose step and state are shared out among the towers."""
