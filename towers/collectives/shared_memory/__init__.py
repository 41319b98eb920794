"""Collectives of the CPU towers of one host, through memory that they share."""
