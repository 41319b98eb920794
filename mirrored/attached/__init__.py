"""Features that a strategy attaches to models: the mirror check, synchronised BatchNorm, metrics."""
