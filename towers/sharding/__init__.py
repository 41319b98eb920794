"""Optimizers whose step and state are sharded over the towers."""
