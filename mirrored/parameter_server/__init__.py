"""Parameter servers: variables live in server processes, and workers compute scheduled functions, on Ray.

[Note: a room of its own] Workers come and go and see parameters of different ages, so nothing here is equal on all
towers, in the same order, or in step (rules R1, R2, R4 and R5). The chief is an ordinary one-device strategy: models,
checkpoints and data work as elsewhere. Of the towers' engine nothing is used.
"""
