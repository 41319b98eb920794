"""Makes towers mirror images of each other, and checks whether they still are."""
