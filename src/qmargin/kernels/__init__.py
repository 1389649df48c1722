"""Computations of rows and heads: plain PyTorch, and kernels that are tested against it.

``solver`` has root, posterior and loss of a row. ``rows`` solves whole ``[B, k]`` batches, for
``losses.functional``. ``head_reference`` has the operations of a head without a ``[B, k]`` matrix,
``triton`` the same as fused kernels for a GPU; ``dispatch`` chooses between the two.
"""
