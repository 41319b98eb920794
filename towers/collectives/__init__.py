"""Collectives: one interface, and its implementations."""
