"""Numbers of rows and heads: plain PyTorch first, kernels that must agree with it.

``solver`` has root, posterior and loss of a row. ``rows`` solves whole ``[B, k]`` batches, for
``losses.functional``. ``head_reference`` has the operations of a head that never makes ``[B, k]``,
``triton`` the same fused, for a GPU; ``dispatch`` chooses between the two.
"""
