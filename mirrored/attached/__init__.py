"""Features that a strategy attaches to models: the mirror check, synchronised batch norm, metrics."""
