"""Ranks agree or fail together: no rank goes on alone into a collective that the others never reach."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

WAIT_FOR_REASON_S = 3.0
T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed, or the ranks were given different arguments."""


def everyone(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """`value` of every rank, in the order of ranks. `group` is a gloo group, or None for a single process."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def together(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """If the body fails on some ranks, every rank raises: the failed ones their own error, the others a RankError.

    For stages without collectives, such as loading: a rank that fails still tells the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, when the other ranks know
        error = caught
    failures: list[str | None] = []
    try:
        with peers_present(doing):
            failures = everyone(group, None if error is None else describe(error))
    except RankError:
        if error is None:
            raise
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if failed:
        raise RankError(f"{doing} failed on other ranks; " + "; ".join(failed))


@contextmanager
def peers_present(doing: str) -> Iterator[None]:
    """Raise a RankError that says so if another rank ends inside, or does not answer in time."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        if _lost_a_peer(error):
            text = f"another rank has ended or did not answer in time ({doing}); its own output may say why"
            raise RankError(text) from error
        raise


def in_turns(group: dist.ProcessGroup | None, turns: int, mine: int, doing: str, body: Callable[[], T]) -> T:
    """`body()` on the ranks whose turn is `mine`, one turn after the other; a failure in any turn ends all ranks."""
    result: list[T] = []
    for turn in range(turns):
        with together(group, doing):
            if turn == mine:
                result.append(body())
    return result[0]


@contextmanager
def spread_failure(group: dist.ProcessGroup | None, rank: int, stage: str) -> Iterator[None]:
    """For stages with collectives: an error is left in the store, where ranks that lose their peer find the reason.

    `stage` names this stage; no other one may have the same name.
    """
    if group is None:
        yield
        return
    store = dist.PrefixStore(f"fodit/{stage}", _get_default_store())
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        reason = _failure_of_another(store, rank) if _lost_a_peer(error) else None
        if reason is not None:
            raise RankError(reason) from error
        store.set(str(rank), describe(error))
        raise


def _lost_a_peer(error: Exception) -> bool:
    return isinstance(error, dist.DistError | TimeoutError | ConnectionError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out", "timeout"))
    )


def _failure_of_another(store: dist.Store, rank: int) -> str | None:
    size = dist.get_world_size()
    end = time.monotonic() + WAIT_FOR_REASON_S
    while True:
        try:
            for other in range(size):
                if other != rank and store.check([str(other)]):
                    return f"rank {other} failed: {store.get(str(other)).decode()}"
        except (dist.DistError, RuntimeError):
            return "the connection to rank 0 was lost; that process has ended (see its own output)"
        if time.monotonic() > end:
            return (
                "a peer rank stopped without giving a reason, or did not answer in time: it was probably killed "
                "(out of memory?), or does something else"
            )
        time.sleep(0.1)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_same(group: dist.ProcessGroup | None, what: str, arguments: Mapping[str, Any]) -> None:
    """Raise RankError on every rank if the ranks were given different `arguments`, naming which and how."""
    if group is None:
        return
    given = everyone(group, {name: digest(value) for name, value in arguments.items()})
    wrong = []
    for name in dict.fromkeys(name for one in given for name in one):
        values = [one.get(name, "not given") for one in given]
        if len(set(values)) > 1:
            wrong.append(f"{name} is " + ", ".join(f"{value} on rank {r}" for r, value in enumerate(values)))
    if wrong:
        raise RankError(f"the ranks disagree on the arguments of {what}: " + "; ".join(wrong))


def digest(value: Any) -> str:
    """A short text that differs where values differ.

    Arrays and generators go by content, mappings by their items in any order, functions and all else by name.
    """
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"tensor {tuple(value.shape)} {value.dtype} #{fingerprint(content)}"
    if isinstance(value, torch.Generator):
        state = fingerprint(value.get_state().numpy().tobytes())
        return f"generator on {value.device.type}, seed {value.initial_seed()} #{state}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key}: {digest(item)}" for key, item in value.items())) + "}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} #{fingerprint(value.tobytes())}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(digest, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(digest(item) for item in value) + "]"
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:160]}… #{fingerprint(text.encode())}"
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def fingerprint(content: bytes) -> str:
    """Differs where the contents differ."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()
