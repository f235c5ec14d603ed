"""World of a rank: its number, device and process group. The only reader of RANK, WORLD_SIZE and the other environment
variables that torchrun sets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from launcher.config.schema import Device
from launcher.errors import ConfigError, SiteError
from launcher.plan.host import shares_gpus
from launcher.process import Copies

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


T = TypeVar("T")

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Everyone(Protocol):
    """Ranks that compare something."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def of_all(self, value: T) -> list[T]: ...


@dataclass(frozen=True)
class World:
    """Numbering of this process: ``rank`` of ``size`` in the job, ``local_rank`` of ``local_size`` on its host.

    With outer steps, ``rank`` and ``size`` are those within its site, which is number ``site`` of ``sites``: the
    process group, and everything that a window communicates, is that of the site.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int = 1
    site: int = 0
    sites: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Read the world from torchrun's environment variables; without any of them it is this process alone.

        Raises:
            SiteError: a variable is missing or out of range, or another program has started several processes.
        """
        if not any(name in env for name in _OF_TORCHRUN):
            if copies := Copies.of(env, interactive=os.isatty(0)):
                raise SiteError(
                    f"{copies.starter} has started {copies.number} copies of this process, and each would train "
                    "alone.\n  Start one command: `launch run cluster=slurm -- SCRIPT`, or `launch run -- SCRIPT` on "
                    f"one host.\n  A copy that is to train alone: env -u {' -u '.join(copies.ranks)} python SCRIPT"
                )
            return cls(rank=0, size=1, local_rank=0)
        size, local_size = _number(env, "WORLD_SIZE", low=1), _number(env, "LOCAL_WORLD_SIZE", low=1)
        return cls(
            rank=_number(env, "RANK", high=size - 1),
            size=size,
            local_rank=_number(env, "LOCAL_RANK", high=local_size - 1),
            local_size=local_size,
        )

    @classmethod
    def here(cls, sites: int = 1) -> World:
        """Return the world of this process, in a job of ``sites`` sites."""
        job = cls.from_env(os.environ)
        if sites == 1:
            return job
        job.require_divisible(sites)
        site, rank = divmod(job.rank, job.size // sites)
        return dataclasses.replace(job, rank=rank, size=job.size // sites, site=site, sites=sites)

    def require_divisible(self, sites: int) -> None:
        """Raise ConfigError if the ranks cannot be divided into ``sites`` sites."""
        if self.size % sites:
            raise ConfigError("WORLD_SIZE", self.size, f"cannot be divided into the plan's {sites} sites.")

    @property
    def divided(self) -> bool:
        """Return whether the ranks of this job are divided into sites."""
        return self.sites > 1

    @property
    def rank_in_job(self) -> int:
        """Return the rank among those of all sites."""
        return self.site * self.size + self.rank

    @property
    def in_job(self) -> tuple[int, int]:
        """Return the rank among those of all sites, and their number."""
        return self.rank_in_job, self.size * self.sites

    def require_size(self, planned: int) -> None:
        """Raise ConfigError if the plan is for another number of ranks."""
        if self.size != planned:
            raise ConfigError(
                "WORLD_SIZE", self.size, f"the plan is for a world size of {planned}.",
                "Make the plan in the job itself: launcher.make_plan takes the world from torchrun.",
            )  # fmt: skip

    def of_all(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Return the ``value`` of every rank, by rank. All ranks call it; values are pickled.

        Args:
            group: process group of all ranks to use instead of the default one.
        """
        values = [value] * self.size
        if self.size > 1:
            import torch.distributed as dist

            dist.all_gather_object(values, value, group)
        return values

    def to_rank_0(self, value: T) -> list[T] | None:
        """Return on rank 0 the ``value`` of every rank, by rank; None on the others. All ranks call it; values are
        pickled."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            import torch.distributed as dist

            dist.gather_object(value, None if self.rank else values)
        return None if self.rank else values

    def of_rank_0(self, value: T, group: dist.ProcessGroup | None = None) -> T:
        """Return rank 0's ``value``. All ranks call it; the value is pickled. ``group``: as in ``of_all``."""
        values = [value]
        if self.size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(values, 0, group)
        return values[0]


ALONE = World(rank=0, size=1, local_rank=0)


def _number(env: Mapping[str, str], name: str, *, low: int = 0, high: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        raise SiteError(
            f"{name} is not set: this process was not started by torchrun.\n  Start it with `launch run -- SCRIPT`."
        )
    if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise SiteError(f"{name}={text}: must be a whole number, {limits}.")
    return int(text)


def device_of(world: World, device: Device) -> torch.device:
    """Return the torch device of this rank.

    Raises:
        SiteError: torch has no such device.
    """
    import torch

    if device is Device.cpu:
        return torch.device("cpu")
    index, count = world.local_rank, torch.cuda.device_count()
    if shares_gpus() and count:
        index %= count
    if count <= index:
        raise SiteError(
            f"cluster.device=cuda: torch {torch.__version__} sees {count} GPUs, and local rank "
            f"{world.local_rank} needs one of its own.\n  Use cluster.device=cpu, or a CUDA build of torch."
        )
    torch.cuda.set_device(index)
    torch.cuda.init()  # otherwise a device mesh would set the device again, by LOCAL_RANK
    return torch.device("cuda", index)


def join(world: World, device: torch.device, hang_timeout_s: float | None) -> None:
    """Initialise the default process group, unless the user's script has: gloo, and on CUDA also NCCL.

    Ranks that share a GPU use gloo for both devices, because NCCL refuses two ranks on one device.

    Args:
        hang_timeout_s: seconds after which a hang is detected. Collectives wait longer, so that a rank that waits for a
            hanging one does not fail first and appear to be the cause.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if world.divided and dist.get_world_size() != world.size:
            raise SiteError(
                f"The script has made a process group of {dist.get_world_size()} ranks. With outer=diloco the engine "
                f"makes one of the {world.size} ranks of each site.\n  Leave init_process_group out."
            )
        return
    timeout = patience(hang_timeout_s)
    arguments: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "timeout": timeout}
    if world.divided:
        arguments["store"] = dist.PrefixStore(f"site{world.site}", job_store(world))
    elif world.size == 1 and "MASTER_ADDR" not in os.environ:  # a process alone, without torchrun
        arguments["store"] = dist.HashStore()
    if device.type == "cuda" and shares_gpus():
        dist.init_process_group("cpu:gloo,cuda:gloo", **arguments)
    elif device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **arguments)
    else:
        dist.init_process_group("gloo", **arguments)


def job_store(world: World) -> dist.Store:
    """Return the store at which all ranks of a job meet."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", world.rank_in_job, world.size * world.sites))
    return store


def patience(hang_timeout_s: float | None) -> timedelta | None:
    """Return the timeout of collectives for this hang timeout in seconds; None: torch's default."""
    return None if hang_timeout_s is None else timedelta(seconds=max(_TORCH_DEFAULT_S, hang_timeout_s + _MARGIN_S))


# torch's default timeout of a collective (gloo's; NCCL's is 600), and a margin to detect a hang, in seconds
_TORCH_DEFAULT_S, _MARGIN_S = 1800.0, 120.0


def sending_device() -> torch.device:
    """Return the CPU if the process group can send from it, else its GPU: a script may have initialised NCCL only."""
    import torch
    import torch.distributed as dist

    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def disband() -> None:
    """Destroy the process group after a barrier, so that no rank loses its peers while it is still working."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
