"""The recipe of the embedded example: real targets and drafters, trained from scratch.

``python -m dflash_diag.zoo`` rebuilds everything in ``data/zoo`` in stages that checkpoint and
resume: corpus → targets → sequences → drafters → export. `recipe` says what is built, the other
modules say how.
"""
