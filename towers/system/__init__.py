"""The lowest layer: devices, this machine, its network, nested structures, flat memory.

It imports nothing of this project but errors.
"""
