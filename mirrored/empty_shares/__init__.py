"""Towers whose share of a batch is empty: what they get, and what keeps it from being counted.

Such a tower gets a batch of no examples (:mod:`mirrored.empty_shares.empty_batch`) or, for models that cannot take one,
a stand-in (:mod:`mirrored.empty_shares.stand_in`), which must not move running statistics either
(:mod:`mirrored.empty_shares.statistics`). A loss of no examples is an exact zero by itself (:mod:`mirrored.losses`).
Nothing of this is imported before a tower has such a share.
"""
