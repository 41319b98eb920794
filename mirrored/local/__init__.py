"""Local steps: towers step by themselves, and average their parameters every so many steps (docs/advanced/local.md)."""
