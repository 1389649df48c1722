"""The classifier over all identities: prototypes, and the ways to take a step with them.

``classifier`` has ``MarginClassifier``, whose ``forward`` checks the batch (``checks``), gathers it
from the ranks (``sharding``), chooses a path (``paths``) and takes the step by it: ``sparse`` and
``chunked`` without a ``[B, k]`` matrix (``step`` makes their loss and gradients), ``dense`` with
one. ``gradients`` delivers the prototypes' gradient, ``optimizers`` apply a fused one. A new path
is a settings class in ``paths``, a step, and an entry in the table of ``classifier``.
"""
