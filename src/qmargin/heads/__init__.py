"""The classifier over all identities: prototypes, and the ways to take a step with them.

What calls what, in the order of a training step:

- ``classifier``: ``MarginClassifier``. ``forward`` checks the batch (``checks``), gathers it from
  the ranks (``sharding``), chooses a path (``paths``) and takes the step by it.
- ``sparse``, ``chunked`` (whose passes are in ``chunks``): steps that solve all rows without a
  ``[B, k]`` matrix. ``step`` makes the loss and both gradients of them.
- ``dense`` (with ``sampled``), ``top_k``: paths that have all cosines and use autograd.
- ``gradients``: backward delivers the prototypes' gradient in the form that the head was built for.
- ``optimizers``: ``ExactSGD`` and ``SparseSGD`` apply a fused gradient.

A new path is a settings class in ``paths``, a module with its step, and an entry in the table of
``classifier``.
"""
