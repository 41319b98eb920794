"""Parameter servers: variables are stored in server processes, and workers run scheduled functions, on Ray.

[Note: a separate package] Workers join and leave, and see parameters of different ages. So nothing here is equal on all
towers, in the same order, or in step (rules R1, R2, R4 and R5). The chief is an ordinary one-device strategy: models,
checkpoints and data work as elsewhere. The towers' engine is not used.
"""
