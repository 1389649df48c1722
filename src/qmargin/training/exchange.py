"""Short texts between ranks: how the ranks of a save agree that it worked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from qmargin.errors import CheckpointError, ConfigError, RankError

Exchange: TypeAlias = Callable[[str], list[str]]  # my text in, everyone's by rank out


def alone(text: str) -> list[str]:
    """The exchange of a single rank."""
    return [text]


def group_exchange(group: dist.ProcessGroup | None = None) -> Exchange:
    """Exchange over a process group that moves CPU tensors.

    A save in the background needs a group of its own, ``dist.new_group(backend="gloo")``: its
    messages would otherwise mix with those of the training step.

    Args:
        group: The default group if None.
    """

    def exchange(text: str) -> list[str]:
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        world = dist.get_world_size(group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
        width = max(int(size) for size in sizes)
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.zeros(width, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(texts, padded, group=group)
        return [
            bytes(text[: int(size)].numpy()).decode()
            for text, size in zip(texts, sizes, strict=True)
        ]

    return exchange


def check_ranks(rank: int, world: int, exchange: Exchange | None) -> Exchange:
    """The exchange to use; more than one rank cannot do without."""
    if not 0 <= rank < world:
        raise ConfigError(f"rank is {rank} of {world}; it must be at least 0 and below the number")
    if exchange is None and world > 1:
        raise ConfigError(
            f"{world} ranks save one checkpoint together; pass exchange=group_exchange(group)"
        )
    return exchange or alone


def agree(exchange: Exchange, action: Callable[[], Any], *, subject: str) -> list[Any]:
    """Run ``action`` on every rank; either all of them go on, or all of them raise.

    Args:
        exchange: Between the ranks.
        action: What this rank does; what it returns must be JSON.
        subject: Begins the message, as in "the checkpoint of step 12 was not saved".

    Returns:
        What the action returned on each rank.

    Raises:
        CheckpointError: The action failed somewhere, or a rank did not answer; the message names
            the rank and its error.
        RankError: A rank did not answer, and the exchange knows which one.

    Examples:
        >>> agree(alone, lambda: [1, 2], subject="nothing happened")
        [[1, 2]]
    """
    value, failure = None, None
    try:
        value = action()
    except Exception as error:
        failure = error
    reply = {"value": value, "error": None if failure is None else _describe(failure)}
    try:
        replies = [json.loads(text) for text in exchange(json.dumps(reply))]
    except RankError:
        raise  # it names the rank
    except RuntimeError as error:  # what torch.distributed raises for a peer that is gone
        raise CheckpointError(
            f"{subject}: a rank stopped answering ({error}); look for the first error among the "
            "ranks and resume"
        ) from (failure or error)
    problems = [
        f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if reply["error"]
    ]
    if problems:
        texts = problems if len(replies) > 1 else [replies[0]["error"]]
        raise CheckpointError(f"{subject}: {'; '.join(texts)}") from failure
    return [reply["value"] for reply in replies]


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
