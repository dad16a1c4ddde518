"""Rules over the facts of all ranks that came: each gives one finding, or several."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from allgrad.cli.doctor.findings import Finding, ok, problem, warning
from allgrad.report.units import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from allgrad.cli.doctor.facts import Facts

    ByRank = Mapping[int, Facts]

__all__ = ["by_host", "examine", "gpu_of"]

_SMALL_SHARED_MEMORY = 1 << 30
_LOOPBACK = "127."


def examine(facts: ByRank) -> list[Finding]:
    """The findings of every rule."""
    rules = (_versions, _rank_order, _devices, _peer_access, _interfaces, _addresses)
    more = (_environment, _open_files, _shared_memory)
    return [finding for rule in (*rules, *more) for finding in rule(facts)]


def by_host(facts: ByRank) -> dict[str, list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    hosts = defaultdict(list)
    for rank in sorted(facts):
        hosts[facts[rank].host].append(rank)
    return dict(hosts)


def _values(facts: ByRank, read: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Which ranks have which value."""
    found = defaultdict(list)
    for rank in sorted(facts):
        found[read(facts[rank])].append(rank)
    return dict(found)


def _differ(values: Mapping[str, list[int]]) -> str:
    return "; ".join(f"{value or 'none'} on {ranks_text(ranks)}" for value, ranks in values.items())


def _versions(facts: ByRank) -> Iterator[Finding]:
    equal = []
    for name, label in (
        *(("allgrad", "allgrad"), ("torch", "torch"), ("nccl", "NCCL")),
        *(("cuda", "CUDA"), ("python", "Python")),
    ):
        values = _values(facts, lambda own, name=name: str(getattr(own, name)))  # type: ignore[misc]
        if len(values) == 1:
            equal += [f"{label} {value}" for value in values if value]
        elif name in {"allgrad", "torch", "nccl"}:
            yield problem(
                f"{label} version",
                _differ(values),
                "Ranks with different versions misread each other's messages, or wait forever.",
                "Install one version on every host, in the environment that the launcher starts.",
            )
        else:
            yield warning(
                f"{label} version",
                _differ(values),
                "The ranks run different environments; compiled kernels and results may differ.",
                "Start every rank from the same environment.",
            )
    if equal:
        yield ok("versions", ", ".join(equal) + " on every rank")


def _rank_order(facts: ByRank) -> Iterator[Finding]:
    hosts = by_host(facts)
    shown = "; ".join(f"{host}: {ranks_text(ranks)}" for host, ranks in list(hosts.items())[:16])
    shown += f"; and {len(hosts) - 16} hosts more" if len(hosts) > 16 else ""
    scattered = [h for h, ranks in hosts.items() if ranks[-1] - ranks[0] >= len(ranks)]
    if scattered and len(hosts) > 1:
        yield warning(
            "rank order",
            shown,
            "Neighbouring ranks are on different hosts, so messages that could stay inside a host "
            "use the network.",
            "srun --distribution=block, or start all ranks of a host with one torchrun.",
        )
    else:
        yield ok("rank order", shown)
    sizes = {len(ranks) for ranks in hosts.values()}
    if len(sizes) > 1 and not scattered:
        yield warning(
            "ranks by host",
            "; ".join(f"{host}: {len(ranks)}" for host, ranks in list(hosts.items())[:16]),
            "Hosts with fewer ranks wait for the others.",
            "Start the same number of ranks on every host, unless the hosts differ.",
        )


def _devices(facts: ByRank) -> Iterator[Finding]:
    for host, ranks in by_host(facts).items():
        own = facts[ranks[0]]
        gpus = f"{len(own.gpus)} x {own.gpus[0]}" if own.gpus else "no GPU"
        found = f"{host}: {ranks_text(ranks)}, {own.cores} cores, {gpus}"
        chosen = _values({r: facts[r] for r in ranks}, gpu_of)
        shared = [f"{ranks_text(r)} on {gpu}" for gpu, r in chosen.items() if gpu and len(r) > 1]
        if shared:
            yield warning(
                "devices",
                f"{found}; {', '.join(shared)}",
                "NCCL refuses two ranks on one GPU; the ranks here are tested on the CPU only.",
                "Start at most as many ranks on a host as it has GPUs.",
            )
        elif len(ranks) > own.cores:
            yield warning(
                "devices",
                found,
                "More ranks than cores: messages wait until the receiving rank gets a core.",
                "Start fewer ranks on this host, or give the job more cores (--cpus-per-task).",
            )
        else:
            yield ok("devices", found)


def gpu_of(own: Facts) -> str:
    """The GPU that a rank uses by its local rank; empty without GPUs."""
    if not own.gpus:
        return ""
    visible = own.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = own.local_rank % len(own.gpus)
    return f"GPU {visible[index] if index < len(visible) and visible[index] else index}"


def _peer_access(facts: ByRank) -> Iterator[Finding]:
    for host, ranks in by_host(facts).items():
        table = facts[ranks[0]].peer_access
        without = [f"{a} and {b}" for a, row in enumerate(table) for b in range(a) if not row[b]]
        if without:
            yield warning(
                "GPU peer access",
                f"{host}: none between GPUs {', '.join(without[:8])}",
                "Messages between these GPUs go through the memory of the host.",
                "Expected without NVLink or behind IOMMU; otherwise look at nvidia-smi topo -m.",
            )
        elif len(table) > 1:
            yield ok("GPU peer access", f"{host}: between all {len(table)} GPUs")


def _interfaces(facts: ByRank) -> Iterator[Finding]:
    """Interfaces that a variable names, and those that there are."""
    bad = False
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for rank, own in sorted(facts.items()):
            named = own.environment.get(variable, "")
            missing = [
                name for name in named.split(",") if name and not _matches(name, own, variable)
            ]
            if missing:
                bad = True
                have = ", ".join(f"{n} {a}".strip() for n, a in own.interfaces.items())
                yield problem(
                    "interface",
                    f"rank {rank}: {variable}={named}, but {own.host} has {have or 'none'}",
                    "The rank cannot open its connections there, and the job does not start.",
                    f"Set {variable} to an interface of {own.host} with an address, or unset it.",
                )
    for host, ranks in by_host(facts).items():
        if not bad:
            own = facts[ranks[0]]
            there = [f"{name} {address}" for name, address in own.interfaces.items() if address]
            yield ok("interfaces", f"{host}: {', '.join(there) or 'unknown on this system'}")


def _matches(name: str, own: Facts, variable: str) -> bool:
    """NCCL takes prefixes, ``=exact`` names and ``^excluded`` ones; Gloo exact names."""
    with_address = [found for found, address in own.interfaces.items() if address]
    if not own.interfaces or name.startswith("^"):
        return True
    if variable == "NCCL_SOCKET_IFNAME" and not name.startswith("="):
        return any(found.startswith(name) for found in with_address)
    return name.lstrip("=") in with_address


def _addresses(facts: ByRank) -> Iterator[Finding]:
    """The address that each rank tells the others."""
    hosts = by_host(facts)
    local = [r for r, own in facts.items() if own.gloo_address.startswith(_LOOPBACK)]
    shown = "; ".join(
        f"{host}: {facts[ranks[0]].gloo_address}" for host, ranks in list(hosts.items())[:16]
    )
    if local and len(hosts) > 1:
        yield problem(
            "address",
            f"{ranks_text(local)} would give the other hosts an address of the loopback ({shown})",
            "The host's own name leads to 127.*, so ranks on other hosts connect to themselves.",
            "Set GLOO_SOCKET_IFNAME to the interface of the network, or fix /etc/hosts.",
        )
    else:
        yield ok("address", shown)


def _environment(facts: ByRank) -> Iterator[Finding]:
    """Variables that differ between ranks, or contradict each other."""
    found = []
    names = sorted({name for own in facts.values() for name in own.environment})
    for name in names:
        values = _values(facts, lambda own, name=name: own.environment.get(name, ""))  # type: ignore[misc]
        if len(values) > 1 and (name.startswith("ALLGRAD_") or name in _MUST_AGREE):
            found.append(
                problem(
                    "environment",
                    f"{name} differs: {_differ(values)}",
                    "The ranks would not do the same, and wait for each other.",
                    f"Set {name} to one value on every rank.",
                )
            )
    hosts = by_host(facts)
    for rank, own in sorted(facts.items()):
        found += _contradictions(rank, own.environment, len(hosts))
    crowded = {
        host: threads * len(ranks)
        for host, ranks in hosts.items()
        if (threads := _int(facts[ranks[0]].environment.get("OMP_NUM_THREADS"))) > 1
        and threads * len(ranks) > facts[ranks[0]].cores
    }
    for host, threads in crowded.items():
        found.append(
            warning(
                "environment",
                f"{host}: OMP_NUM_THREADS of its ranks add up to {threads} threads, "
                f"on {facts[hosts[host][0]].cores} cores",
                "Threads of computation take the cores from those that move messages.",
                "Set OMP_NUM_THREADS to cores / ranks of a host, or to 1.",
            )
        )
    shown = ", ".join(n for n in names if n not in _FROM_LAUNCHER) or "nothing set"
    yield from found or [ok("environment", f"no contradiction ({shown})")]


_MUST_AGREE = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET"),
        *("NCCL_IB_DISABLE", "NCCL_SOCKET_FAMILY", "TORCH_DISTRIBUTED_DEBUG"),
    }
)
_FROM_LAUNCHER = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    }
)


def _contradictions(rank: int, variables: Mapping[str, str], hosts: int) -> Iterator[Finding]:
    """Pairs of variables of one rank that cannot both be meant."""
    address = variables.get("MASTER_ADDR", "")
    if hosts > 1 and rank and (address == "localhost" or address.startswith(_LOOPBACK)):
        yield problem(
            "environment",
            f"rank {rank}: MASTER_ADDR={address}, but the ranks are on {hosts} hosts",
            "Each host would look for the store on itself.",
            "Set MASTER_ADDR to the name or address of the host of rank 0.",
        )
    if variables.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and _int(
        variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    ):
        yield warning(
            "environment",
            f"rank {rank}: TORCH_NCCL_BLOCKING_WAIT=1 beside TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "A call that hangs raises in one setting and ends the process in the other.",
            "Set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 with the first, or unset the first.",
        )
    slurm, own = variables.get("SLURM_PROCID"), variables.get("RANK")
    same_size = variables.get("SLURM_NTASKS") == variables.get("WORLD_SIZE")
    if slurm and own and same_size and slurm != own and "SLURM_STEP_ID" in variables:
        yield warning(
            "environment",
            f"rank {rank}: SLURM_PROCID={slurm}, but RANK={own}",
            "Code that reads one and code that reads the other disagree about which rank this is.",
            "Set RANK from SLURM_PROCID, or leave RANK unset under srun.",
        )


def _int(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _open_files(facts: ByRank) -> Iterator[Finding]:
    needed = 256 + 8 * len(facts)  # a connection to each rank in a few groups, and files
    low = {r: own.open_files for r, own in facts.items() if 0 <= own.open_files < needed}
    if low:
        yield warning(
            "open files",
            f"{ranks_text(low)}: at most {min(low.values())}, {needed} may be needed",
            "Every process group keeps a connection to every rank; beyond the limit none opens.",
            "ulimit -n 65536 before the launcher, or LimitNOFILE= of its service.",
        )
    else:
        limits = [own.open_files for own in facts.values() if own.open_files >= 0]
        yield ok("open files", f"at most {min(limits)} a rank" if limits else "no limit")


def _shared_memory(facts: ByRank) -> Iterator[Finding]:
    small = {
        host: facts[ranks[0]].shared_memory >> 20
        for host, ranks in by_host(facts).items()
        if 0 < facts[ranks[0]].shared_memory < _SMALL_SHARED_MEMORY
    }
    if small:
        yield warning(
            "shared memory",
            "; ".join(f"{host}: {size} MiB" for host, size in small.items()),
            "NCCL and workers of a DataLoader keep buffers there, and end with a bus error when "
            "it is full.",
            "docker run --shm-size=8g, or --ipc=host.",
        )
    else:
        sizes = [own.shared_memory >> 20 for own in facts.values() if own.shared_memory]
        yield ok(
            "shared memory", f"{min(sizes)} MiB or more" if sizes else "unknown on this system"
        )
