"""The strategies: what a script calls, and what they put together for it."""
