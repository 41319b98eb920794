"""Towers whose share of a batch is empty: the batches that they receive, and why these do not count.

Such a tower receives a batch without examples (:mod:`mirrored.empty_shares.empty_batch`). For models that do not
support one, it receives a stand-in, and running statistics are restored after it
(:mod:`mirrored.empty_shares.stand_in`). A loss without examples is an exact zero by itself (:mod:`mirrored.losses`).
These modules are imported only when a tower has such a share.
"""
