"""Losses: divergences times margins, as operators, modules and published presets.

What calls what: ``presets`` build a ``margin_loss.MarginLoss`` from a divergence (``divergences``)
and a margin (``margins``, ``adaptive``). It lifts the target out of its row and calls
``operators``, which put ``kernels.rows`` behind autograd. ``functional`` has the operators alone,
``checks`` what all of them refuse, ``hardness`` the relation between scales at different alphas.
"""
