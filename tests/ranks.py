"""Runs functions on several gloo ranks. The processes are kept, so that torch is imported once per session."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 180


class Ranks:
    """A pool of processes; `run(n, function, *args)` calls `function(*args)` on n ranks as under torchrun."""

    def __init__(self, most: int = 4) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, count: int, function: Callable, *args: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, text of the error) of every rank."""
        port = free_port()
        for rank in range(count):
            self._pipes[rank].send((rank, count, port, function, args))
        found: dict[int, tuple[bool, Any]] = {}
        while waiting := {self._pipes[rank]: rank for rank in range(count) if rank not in found}:
            ready = wait(list(waiting), TIMEOUT_S)
            # A rank may hang because another one failed: that one's error says why.
            failed = [f"\nrank {rank} failed:\n{text}" for rank, (well, text) in found.items() if not well]
            assert ready, f"ranks {list(waiting.values())} of {count} hang in {function.__name__}{''.join(failed)}"
            found |= {waiting[pipe]: pipe.recv() for pipe in ready}
        return [found[rank] for rank in range(count)]

    def run(self, count: int, function: Callable, *args: Any) -> list[Any]:
        """The result of every rank; raises AssertionError with the traceback if one fails."""
        found = self.outcomes(count, function, *args)
        for rank, (well, result) in enumerate(found):
            assert well, f"rank {rank} of {count} failed:\n{result}"
        return [result for _, result in found]

    def errors(self, count: int, function: Callable, *args: Any) -> list[str]:
        """The last line of every rank's error; raises AssertionError if one does not fail."""
        found = self.outcomes(count, function, *args)
        for rank, (well, _) in enumerate(found):
            assert not well, f"rank {rank} of {count} did not fail"
        return [text.strip().splitlines()[-1] for _, text in found]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def enter_rank(rank: int, count: int, port: int, gpus: int = 0) -> None:
    """Set the environment that torchrun sets.

    With fewer GPUs than ranks these share them: every rank plays a host of its own, for NCCL refuses two ranks of one
    host on one GPU, and NCCL goes through sockets.
    """
    shared = 0 < gpus < count
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % gpus if shared else rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if shared:
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        rank, count, port, function, args = pipe.recv()
        with patch.dict(os.environ):  # what a function sets there is gone with it
            enter_rank(rank, count, port, torch.cuda.device_count())
            try:
                outcome = (True, function(*args))
            except Exception:  # noqa: BLE001 - the parent judges it
                outcome = (False, traceback.format_exc())
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        pipe.send(outcome)
