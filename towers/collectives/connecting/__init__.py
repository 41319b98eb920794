"""Connecting the towers: the only place that chooses how they communicate."""
