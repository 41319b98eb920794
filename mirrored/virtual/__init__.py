"""Virtual towers, which split a step and add up its results identically on any number of towers."""
