"""Towers are mirror images of each other: making them so, and finding out whether they still are."""
