"""The sparse head's operations as Triton kernels, with the names of ``head_reference``."""
