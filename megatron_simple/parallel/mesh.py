"""Who talks to whom: the (pipeline, data, tensor) mesh of processes as a value, and the start of torch.distributed.

The only reader of environment variables: torchrun, deepspeed, srun and mpirun each tell a process its rank in their own
words; without any of them the run is one process. Tensor ranks are adjacent (fastest), as in DeepSpeed's topology.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_simple.config import ConfigError, ParallelConfig

# (rank, world size, rank on the node) by launcher; the first complete row counts.
LAUNCHER_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Axis:
    """One parallel dimension as a layer sees it. `Axis()` has size one and needs no process group."""

    size: int = 1
    rank: int = 0
    group: Any = field(default=None, repr=False, compare=False)

    def part(self, whole: int) -> int:
        """This rank's share of `whole`; ValueError when it does not divide evenly."""
        if whole % self.size:
            raise ValueError(f"{whole} cannot be divided over {self.size} ranks")
        return whole // self.size


@dataclass(frozen=True)
class Process:
    """This process among those of the launch."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "single process"


@dataclass(frozen=True)
class Mesh:
    """All three axes, and the process and device they were made for."""

    process: Process = Process()
    pp: Axis = Axis()
    dp: Axis = Axis()
    tp: Axis = Axis()
    device: torch.device = torch.device("cpu")

    @property
    def is_writer(self) -> bool:
        """The one rank that prints and writes shared files."""
        return self.process.rank == 0

    @property
    def is_node_owner(self) -> bool:
        """The rank that builds what every node needs on its own disk."""
        return self.process.local_rank == 0

    def barrier(self) -> None:
        if self.process.world_size > 1:
            dist.barrier()

    def from_writer(self, value: Any) -> Any:
        """The writer's `value` on every rank, so that all take the same decision."""
        if self.process.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def any_rank(self, flag: bool) -> bool:
        """True on every rank as soon as it is true on one."""
        if self.process.world_size == 1:
            return flag
        seen = torch.tensor([int(flag)])  # on the host: a device tensor would make every step wait for the device
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())


def discover_process() -> Process:
    """Rank, world size and node-local rank from whichever launcher started this process."""
    for names in LAUNCHER_VARIABLES:
        if all(name in os.environ for name in names):
            rank, world_size, local_rank = (int(os.environ[name]) for name in names)
            if world_size > 1 or names[0] == "RANK":
                return Process(rank, world_size, local_rank, launcher=names[0])
    return Process()


def record_failure(text: str) -> None:
    """Leaves `text` where torchrun looks for the reason of a failure, so that its closing report names it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        with contextlib.suppress(OSError):  # the report is torchrun's; the text has been printed already
            reason = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
            Path(file).write_text(json.dumps({"message": reason}), encoding="utf-8")


def start_distributed(process: Process, *, timeout_minutes: float) -> torch.device:
    """Joins the process group (NCCL for tensors on a GPU, gloo for those on the host) and returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(process.local_rank)  # DeepSpeed reads it
    timeout = datetime.timedelta(minutes=timeout_minutes)
    # Groups do not inherit the limit of the default group: without this ours and DeepSpeed's would wait 30 minutes (NCCL: 10).
    dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = timeout
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if process.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return device
    if process.launcher != "RANK":
        os.environ.update(RANK=str(process.rank), WORLD_SIZE=str(process.world_size))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not set: export the address and a free port of the first node")
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    except (dist.DistNetworkError, dist.DistStoreError, socket.gaierror) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(f"rank {process.rank} cannot join at {where} (MASTER_ADDR, MASTER_PORT): {error}") from error
    return device


def stop_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(parallel: ParallelConfig, process: Process, device: torch.device) -> Mesh:
    """Lays the ranks out as rank = (pp * DP + dp) * TP + tp and makes one group per line of each axis."""
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    ranks = torch.arange(process.world_size).view(pp, -1, tp)  # [PP, DP, TP]
    axes = [_axis(ranks, dim, process.rank) for dim in range(3)]
    return Mesh(process, *axes, device=device)


def _axis(ranks: torch.Tensor, dim: int, rank: int) -> Axis:
    lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    mine = next(line for line in lines if rank in line)
    groups = [dist.new_group(line) for line in lines]  # every rank must take part in making every group
    return Axis(len(mine), mine.index(rank), groups[lines.index(mine)])
