"""Virtual towers: a step cut in the same way, and added up in the same order, on any number of towers."""
