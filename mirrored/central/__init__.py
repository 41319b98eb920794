"""Central storage: one copy of parameters and optimizer state, in the memory of a host."""
