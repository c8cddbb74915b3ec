"""Runs a function on several gloo ranks of this machine and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megatron_simple.parallel.mesh import stop_distributed

TIMEOUT_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank (a module-level function; arguments and results must pickle), by rank.

    The ranks find each other through the variables that torchrun sets. The first failing rank's traceback is raised.
    A single rank is this process itself: a new one would spend seconds on imports.
    """
    if world_size == 1:
        try:
            return [function(*arguments)]
        finally:
            stop_distributed()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, arguments)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    collected: dict[int, Any] = {}
    try:
        while len(collected) < world_size:
            while results.empty():
                dead = [i for i, p in enumerate(ranks) if p.exitcode not in (None, 0) and i not in collected]
                if dead:
                    raise RuntimeError(f"rank {dead[0]} ended with exit code {ranks[dead[0]].exitcode}")
                ranks[0].join(0.02)
            rank, value, error = results.get()
            if error is not None:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            collected[rank] = pickle.loads(value)
        for process in ranks:
            process.join(TIMEOUT_SECONDS)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [collected[rank] for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, results: Any, function: Callable, arguments: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        results.put((rank, pickle.dumps(function(*arguments)), None))  # bytes: tensors would be shared by descriptor
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
