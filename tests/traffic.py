"""Counting what one rank hands to its process group, and gets from it."""

from collections import Counter

import torch
import torch.distributed as dist

from allgrad._wire.calls import resolve
from allgrad._wire.hosts import find_topology

# What a process group calls them, and what they are called here.
MOVERS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "isend",
    "recv": "irecv",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    **{name: name for name in ("allgather", "gather", "scatter", "reduce", "reduce_scatter")},
    **{name: name for name in ("alltoall", "_reduce_scatter_base", "reduce_scatter_single")},
    **{name: name for name in ("allreduce_coalesced", "allgather_coalesced", "recv_anysource")},
}


class Traffic:
    """Counts this rank's calls of its process group, and the bytes to and from other ranks."""

    def __enter__(self):
        find_topology(resolve("Traffic", None))  # what a group finds out once is not counted
        self.calls, self.sent, self.received = Counter(), 0, 0
        self.sent_to, self.posted = Counter(), []  # point to point
        group = dist.ProcessGroup
        counted = [(group, name) for name in MOVERS if hasattr(group, name)]
        # Messages between two ranks are posted by the backend itself.
        counted += [(torch._C._distributed_c10d.Backend, name) for name in ("send", "recv")]
        self.kept = {(kind, name): vars(kind)[name] for kind, name in counted}
        for kind, name in counted:
            setattr(kind, name, self.counting(getattr(kind, name), name))
        return self

    def __exit__(self, *_):
        for (kind, name), call in self.kept.items():
            setattr(kind, name, call)

    def counting(self, real, name):
        def call(group, *args, **options):
            self.calls[MOVERS[name]] += 1
            sent, received = self.moved(name, *args, **options)
            self.sent += sent
            self.received += received
            return real(group, *args, **options)

        return call

    def moved(self, name, x, *args, **_):
        rank = dist.get_rank()
        if MOVERS[name] == "all_to_all_single":
            _, into, sent, *_ = args
            if not sent and not into:
                each = x.nbytes // dist.get_world_size() * (dist.get_world_size() - 1)
                return each, each
            row = x.nbytes // len(x) if len(x) else 0  # nothing comes then
            width = row or args[0].nbytes // max(1, len(args[0]))
            return width * (sum(sent) - sent[rank]), width * (sum(into) - into[rank])
        if MOVERS[name] == "all_gather_into_tensor":
            return 0, 0
        (x,) = x
        if name in {"send", "recv"}:
            self.posted.append((name, args[0]))
        if name == "send":
            self.sent_to[args[0]] += x.nbytes
        if name == "broadcast":
            return (x.nbytes, 0) if args[0].rootRank == rank else (0, x.nbytes)
        return {"send": (x.nbytes, 0), "recv": (0, x.nbytes), "allreduce": (x.nbytes, x.nbytes)}[
            name
        ]

    def __eq__(self, cost):
        return (dict(self.calls), self.sent, self.received) == cost

    def __repr__(self):
        return repr((dict(self.calls), self.sent, self.received))

    __hash__ = None
