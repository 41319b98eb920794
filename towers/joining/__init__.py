"""How processes that start together find out that all of them have joined, and that they belong to one job."""
