"""What one process knows about itself and its host, without asking another rank."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import struct
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENVIRONMENT", "Facts", "gloo_address", "interfaces", "local_facts"]

# Variables that change how ranks find each other and exchange messages.
ENVIRONMENT = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "http_proxy", "no_proxy"),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's facts. Other ranks read them as JSON, so every field is a plain value."""

    host: str = ""
    allgrad: str = ""
    torch: str = ""
    python: str = ""
    cuda: str = ""
    nccl: str = ""
    local_rank: int = 0
    cores: int = 0
    gpus: list[str] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    gloo_address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    open_files: int = 0
    shared_memory: int = 0
    store_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, read: object) -> Facts:
        """Facts of another rank: a field that is missing, or of another type, is left empty."""
        empty, given = cls(), read if isinstance(read, dict) else {}
        known = {
            f.name: given[f.name]
            for f in fields(cls)
            if type(given.get(f.name)) is type(getattr(empty, f.name))
        }
        return cls(**known)


def local_facts(local_rank: int = 0, environment: Mapping[str, str] = os.environ) -> Facts:
    """Look at this process and its host."""
    found = interfaces()
    return Facts(
        host=socket.gethostname(),
        allgrad=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda or "",
        nccl=_nccl_version(),
        local_rank=local_rank,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        peer_access=_peer_access(),
        interfaces=found,
        gloo_address=gloo_address(environment, found),
        environment={
            name: value
            for name, value in environment.items()
            if name in ENVIRONMENT or name.startswith("ALLGRAD_")
        },
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,  # noqa: S108
    )


def gloo_address(environment: Mapping[str, str], found: Mapping[str, str]) -> str:
    """The address at which Gloo has other ranks connect to this one; empty if there is none."""
    named = environment.get("GLOO_SOCKET_IFNAME")
    if named:
        return found.get(named.split(",")[0], "")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"  # what Gloo falls back to


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface; empty for one that has none."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return {}
    return {name: _address_of(name) for name in names}


def _address_of(interface: str) -> str:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            siocgifaddr = 0x8915  # Linux: the address of an interface
            answer = fcntl.ioctl(asked, siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        return ""


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a build of torch without NCCL
        return ""


def _peer_access() -> list[list[bool]]:
    """Whether each GPU of this host can read the memory of each other one."""
    gpus = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]
