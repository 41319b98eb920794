"""Local steps: towers step by themselves, and average parameters every few steps (docs/advanced/slow-networks.md)."""
