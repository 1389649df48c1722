"""Trees of dictionaries, lists, tensors and plain values, as tensors by name and JSON.

State dicts of optimizers and gradient scalers are such trees. JSON keeps their structure exactly:
integer keys, tuples, infinities and NaN come back as they were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from qmargin.errors import CheckpointError

Tree: TypeAlias = Any  # a tensor, None, bool, int, float, str, or a dict, list or tuple of trees


def map_tensors(tree: Tree, function: Callable[[str, Tensor], Any], path: str = "") -> Tree:
    """The same tree with every tensor replaced by ``function(path, tensor)``."""
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, function, _join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_tensors(item, function, _join(path, index)) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def flatten(tree: Tree) -> tuple[str, dict[str, Tensor]]:
    """A tree as JSON text, and its tensors under the names that the text uses.

    Raises:
        CheckpointError: The tree holds something else than tensors and plain values; the message
            names the place.

    Examples:
        >>> import torch
        >>> text, tensors = flatten({"state": {0: torch.ones(2)}, "betas": (0.9, 0.95)})
        >>> list(tensors)
        ['state/0']
        >>> unflatten(text, tensors)
        {'state': {0: tensor([1., 1.])}, 'betas': (0.9, 0.95)}
    """
    tensors: dict[str, Tensor] = {}
    value = _encode(tree, tensors, "")
    return json.dumps(value, indent=1, allow_nan=False) + "\n", tensors


def unflatten(text: str, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that ``flatten`` took apart."""
    try:
        return _decode(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the state is not one that this version wrote ({type(error).__name__}: {error}); "
            "resume from another checkpoint"
        ) from error


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _encode(tree: Tree, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(tree, Tensor):
        name = path or "value"
        while name in tensors:  # a key may itself contain the separator
            name += "'"
        tensors[name] = tree
        return {"$tensor": name}
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {"$float": str(float(tree))}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, list | tuple):
        items = [_encode(item, tensors, _join(path, index)) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    if isinstance(tree, Mapping):
        return _encode_mapping(tree, tensors, path)
    raise CheckpointError(
        f"{path or 'the state'} is a {type(tree).__name__}; a checkpoint holds tensors, numbers, "
        "texts, and dictionaries, lists and tuples of them"
    )


def _encode_mapping(tree: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    for key in tree:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise CheckpointError(
                f"{path or 'the state'} has the key {key!r}; keys are texts or integers"
            )
    items = [(key, _encode(item, tensors, _join(path, key))) for key, item in tree.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return dict(items)
    return {"$items": [[key, item] for key, item in items]}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    content = value[kind]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$float":
        return float(content)
    if kind == "$tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "$items":
        return {key: _decode(item, tensors) for key, item in content}
    raise ValueError(f"unknown kind {kind}")
