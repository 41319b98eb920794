"""How processes that start together find out that all of them are there and belong to one job."""
