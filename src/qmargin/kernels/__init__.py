"""Numbers of rows and heads: plain PyTorch first, kernels that must agree with it.

Read in this order:

- ``solver``: root, posterior and loss of a row; every other module here calls it or is tested
  against it.
- ``rows``: the solver over whole ``[B, k]`` batches, block by block; ``losses.operators`` calls it.
- ``head_types`` and ``head_reference``: the operations of a head that never makes ``[B, k]``;
  ``heads`` calls them.
- ``triton``: the same operations fused, for a GPU. ``dispatch`` chooses between the two.
"""
