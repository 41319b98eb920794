"""Local steps: towers step independently, and average parameters every few steps (docs/advanced/slow-networks.md)."""
