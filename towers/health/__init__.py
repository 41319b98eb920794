"""How a tower is seen to be alive, how it ends, and what the others say about it."""
