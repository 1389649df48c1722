"""Sparse alpha-divergence losses with a probabilistic margin for biometric verification.

The public names are listed once, in ``__init__.pyi``. Each is imported on first use, so that
``import qmargin`` and ``qmargin --help`` do not import torch.
"""

__version__ = "0.1.0"


def _public() -> dict[str, str]:
    """Module of every public name, from the stub beside this file."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    froms = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in froms for alias in node.names}


def __getattr__(name: str) -> object:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'qmargin' has no attribute {name!r}")
    from importlib import import_module

    homes = _public()
    if name == "__all__":
        value: object = sorted(homes)
    elif homes.get(name) == "qmargin":
        value = import_module(f"qmargin.{name}")
    elif name in homes:
        value = getattr(import_module(homes[name]), name)
    else:
        raise AttributeError(f"module 'qmargin' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})
