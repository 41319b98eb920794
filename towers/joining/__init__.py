"""How processes that start together find out that all of them have come, and that they belong to one job."""
