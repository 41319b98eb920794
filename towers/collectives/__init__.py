"""What towers compute together: one interface, and its implementations."""
