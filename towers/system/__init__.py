"""The ground: devices, this machine, its network, nested structures, flat memory. It imports nothing of ours but
errors."""
