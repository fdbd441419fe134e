"""The trainer's processes: which one this is, and how they agree.

Only rank 0 talks to Redis. It shares every decision, so that all ranks take the same branch. These small
messages use a separate gloo group, also on GPUs, where the model's collectives use NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from leeway.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """This process among `size` trainer processes. `device` is where the model lives."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """True on the rank that does all input and output."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def share_int(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self.control)
        return int(tensor.item())

    def share_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank (other ranks pass b"")."""
        size = self.share_int(len(data))
        if self.size == 1 or size == 0:
            return data
        if self.first:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            tensor = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self.control)
        return tensor.numpy().tobytes()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sums over the ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any."""
        return self.max([float(flag)])[0] > 0

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate [n_r, C] CPU tensors over the ranks, in rank order; n_r may differ between ranks."""
        if self.size == 1:
            return rows
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = rows.shape[0]
        dist.all_reduce(counts, group=self.control)
        longest = int(counts.max())
        padded = torch.zeros(longest, rows.shape[1], dtype=rows.dtype)
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.control)
        return torch.cat([part[: int(n)] for part, n in zip(parts, counts, strict=True)])

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1 and tensor.numel():
            dist.all_reduce(tensor, op=op, group=self.control)
        return [float(v) for v in tensor]


def start_ranks(device: str, expected: int, timeout_s: float) -> Ranks:
    """Join the other processes (torchrun's environment), or be the only one.

    device: auto, cpu or cuda. Raises UsageError when there is no such device or when the number of processes
    is not `expected`. `timeout_s` limits every collective, and ranks wait for rollouts in one.
    """
    place = _device(device)
    os.environ.setdefault("DS_ACCELERATOR", place.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != expected:
        raise UsageError(
            f"trainer.ranks={expected}, but {size} trainer process(es) were started; "
            f"use torchrun --nproc-per-node {expected} -m leeway_trainer, or set trainer.ranks={size}"
        )
    limit = timedelta(seconds=timeout_s)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        _skip_shared_memory_op(deepspeed)
    if not dist.is_initialized():
        if size == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's __all__
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    control = dist.new_group(backend="gloo", timeout=limit)
    return Ranks(rank=rank, size=size, device=place, control=control)


def stop_ranks() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("trainer.device=cuda, but torch sees no CUDA device; set trainer.device=cpu or auto")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _skip_shared_memory_op(deepspeed: object) -> None:
    # On CPUs DeepSpeed would compile a C++ op at startup that only its inference all-reduce uses.
    compatible = deepspeed.ops.__compatible_ops__  # type: ignore[attr-defined]
    for name in ("deepspeed_shm_comm", "deepspeed_ccl_comm"):
        if name in compatible:
            compatible[name] = False
