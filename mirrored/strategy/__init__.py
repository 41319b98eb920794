"""The strategies that a script calls, and the parts from which they are assembled."""
