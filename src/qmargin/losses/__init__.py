"""Losses: divergences times margins, as operators, modules and published presets.

``presets`` build a ``margin_loss.MarginLoss`` from a divergence (``divergences``) and a margin
(``margins``). It lifts the target out of its row and calls ``functional``, which
puts ``kernels.rows`` behind autograd.
"""
