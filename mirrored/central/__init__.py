"""Central storage: parameters and optimizers once in the memory of a host."""
