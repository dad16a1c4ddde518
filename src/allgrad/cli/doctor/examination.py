"""The examination of a job: every rank runs it, one rank reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from allgrad._wire.probe import join_world
from allgrad._wire.world import stop
from allgrad.cli.doctor import rules
from allgrad.cli.doctor.exactness import wrong_collectives
from allgrad.cli.doctor.facts import Facts
from allgrad.cli.doctor.findings import Finding, Status, ok, problem, warning, worst
from allgrad.cli.doctor.links import (
    Listener,
    clock_findings,
    connect,
    connection_findings,
    link_findings,
    measure,
)
from allgrad.cli.doctor.meeting import Meeting, reach_store
from allgrad.errors import AllgradError
from allgrad.report.units import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from allgrad.cli.doctor.launch import Launch

__all__ = ["Report", "examine"]

_SLOW_STORE = 0.05  # seconds for one exchange with the store
_FOR_OUTCOMES = 4.0  # seconds before the deadline in which ranks tell how a phase ended
_LEAVE = 2.0


@dataclass(frozen=True, slots=True)
class Report:
    """What the reporting rank found out."""

    started_by: str
    size: int
    findings: list[Finding]
    facts: dict[int, Facts] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        return worst(self.findings)


def examine(launch: Launch, facts: Facts, *, deadline: float) -> Report | None:
    """Examine the job within ``deadline`` seconds; only one rank gets the report.

    That is rank 0, or the lowest rank that came. When the store cannot be reached no rank knows
    of another: then one rank of each host reports what it sees.
    """
    until = time.monotonic() + deadline
    reached = reach_store(launch, deadline)
    if isinstance(reached, Finding):
        findings = [reached, *rules.examine({launch.rank: facts})]
        mine = Report(launch.by, launch.size, findings, {launch.rank: facts})
        return mine if launch.local_rank == 0 else None
    store, seconds = reached
    meeting = Meeting(store, launch.rank, launch.size, until)
    listener = Listener(facts.gloo_address)
    try:
        return _phases(launch, meeting, replace(facts, store_seconds=seconds), listener)
    finally:
        listener.close()
        meeting.leave(_LEAVE)


def _phases(launch: Launch, meeting: Meeting, own: Facts, listener: Listener) -> Report | None:
    """Facts, then connections, then a world; a problem in one leaves out the next."""
    began, rank, size = time.monotonic(), launch.rank, launch.size
    findings: list[Finding] = []

    brought = {"facts": own.as_json(), "at": listener.at, "refusal": listener.refusal}
    phase = meeting.bring("facts", brought)
    facts = _facts_of(phase.brought or {})
    if phase.brought is not None:
        findings += [_who_came(facts, size, time.monotonic() - began), *_store(launch, facts)]
        findings += [*rules.examine(facts), *_refusals(phase.brought)]
    plan = phase.decision if rank else _plan(facts, findings)
    if rank == 0:
        meeting.decide("facts", plan)
    if not isinstance(plan, dict):
        return None if phase.brought is None else _left_out(launch, findings, facts)

    peer = (rank + 1) % size
    at = meeting.listener_of("facts", peer)
    phase = meeting.bring("connect", [peer, at, connect(at, min(5.0, meeting.left()))])
    if rank == 0:
        findings += connection_findings(phase.brought or {})
        findings += _absent(phase.brought or {}, size, "when connections were tried")
        go = worst(findings) is not Status.PROBLEM
        meeting.decide("connect", "go" if go else "stop")
        if not go:
            return _left_out(launch, findings, facts)
    elif phase.decision != "go":
        return _orphaned(launch, meeting, phase.brought)

    phase = meeting.bring("world", _try_world(meeting, plan, launch.local_rank))
    if rank == 0:
        meeting.decide("world", "done")
        ended = phase.brought or {}
        findings += _world_findings(ended, facts, plan["devices"])
        findings += _absent(ended, size, "in the collectives")
        return Report(launch.by, size, findings, facts)
    return None if phase.decision == "done" else _orphaned(launch, meeting, phase.brought)


def _facts_of(brought: Mapping[int, Any]) -> dict[int, Facts]:
    return {
        rank: Facts.from_json(value.get("facts") if isinstance(value, dict) else None)
        for rank, value in brought.items()
    }


def _plan(facts: Mapping[int, Facts], findings: list[Finding]) -> Any:
    """What rank 0 has the others do next: stop, or try these devices on these hosts."""
    if worst(findings) is Status.PROBLEM:
        return "stop"
    hosts = rules.by_host(facts)
    gpus = [[rules.gpu_of(facts[rank]) for rank in ranks] for ranks in hosts.values()]
    own_gpu_each = all(all(those) and len(set(those)) == len(those) for those in gpus)
    devices = ["cpu", "cuda"] if own_gpu_each else ["cpu"]
    return {"devices": devices, "hosts": [ranks[:2] for ranks in hosts.values()]}


def _who_came(came: Iterable[int], size: int, seconds: float) -> Finding:
    missing = sorted(set(range(size)) - set(came))
    if not missing:
        return ok("ranks", f"all {size} came, within {seconds:.1f} s")
    return problem(
        "ranks",
        f"{size - len(missing)} of {size} came ({ranks_text(came)}); missing: {ranks_text(missing)}",
        f"{ranks_text(missing).capitalize()} did not reach the store within {seconds:.1f} s: not "
        "started, ended early, or on a host from which the store cannot be reached.",
        "Look at the output of these ranks, and run allgrad doctor on their hosts; a slow start "
        "needs a longer --deadline.",
    )


def _store(launch: Launch, facts: Mapping[int, Facts]) -> list[Finding]:
    slow = {r: own.store_seconds for r, own in facts.items() if own.store_seconds > _SLOW_STORE}
    where, most = f"{launch.host}:{launch.port}", max(own.store_seconds for own in facts.values())
    if not slow:
        return [ok("store", f"{where}, {most * 1e3:.1f} ms or less for an exchange")]
    return [
        warning(
            "store",
            f"{where}: an exchange takes {ranks_text(slow)} up to {most * 1e3:.0f} ms",
            "Starting groups, and finding out which rank failed, take many of them.",
            "Put the store on a host that is less busy, or nearer.",
        )
    ]


def _refusals(brought: Mapping[int, Any]) -> list[Finding]:
    refused = {
        rank: str(value["refusal"])
        for rank, value in sorted(brought.items())
        if isinstance(value, dict) and value.get("refusal")
    }
    return [
        problem(
            "address",
            f"rank {rank} cannot listen at {why}",
            "It is the address that the host's name leads to, or that of GLOO_SOCKET_IFNAME.",
            "Set GLOO_SOCKET_IFNAME to an interface of that host, or fix its /etc/hosts.",
        )
        for rank, why in list(refused.items())[:8]
    ]


def _try_world(meeting: Meeting, plan: Mapping[str, Any], local_rank: int) -> dict[str, Any]:
    """Start a world, call every collective on each device, and measure the links."""
    devices, rank, size = plan["devices"], meeting.rank, meeting.size
    limit = max(1.0, meeting.left() - _FOR_OUTCOMES)
    ended: dict[str, Any] = {"error": "", "wrong": {}, "links": {}, "called": 0}
    began = time.monotonic()
    try:
        backend = "cpu:gloo,cuda:nccl" if "cuda" in devices else "gloo"
        join_world(meeting.store, rank, size, backend=backend, seconds=limit)
        ended["seconds"] = time.monotonic() - began
        for kind in devices:
            device = _device(kind, local_rank)
            ended["called"], ended["wrong"][kind] = wrong_collectives(rank, size, device)
            ended["links"][kind] = measure(rank, plan["hosts"], device)
    except (RuntimeError, AllgradError) as error:
        ended["error"] = str(error)[:1000] or type(error).__name__
    finally:
        stop()
    return ended


def _device(kind: str, local_rank: int) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # nothing of this rank on the GPU of another
    return device


def _world_findings(
    ended: Mapping[int, Any], facts: Mapping[int, Facts], devices: Iterable[str]
) -> list[Finding]:
    failed = {rank: end["error"] for rank, end in sorted(ended.items()) if end["error"]}
    if failed:
        first = next(iter(failed))
        return [
            problem(
                "world",
                f"{ranks_text(failed)} failed; rank {first}: {failed[first]}",
                "The ranks found each other in the store, but not on the network, or one ended.",
                "Look at the ranks that are named; TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO "
                "show each connection.",
            )
        ]
    findings = [ok("world", f"started in {max(e['seconds'] for e in ended.values()):.2f} s")]
    hosts = {rank: own.host for rank, own in facts.items()}
    for kind in devices:
        wrong = {rank: end["wrong"][kind] for rank, end in ended.items() if end["wrong"][kind]}
        name = f"collectives ({kind})"
        if wrong:
            rank, names = next(iter(sorted(wrong.items())))
            findings.append(
                problem(
                    name,
                    f"wrong on {ranks_text(wrong)}; rank {rank}: {', '.join(names)}",
                    "Data arrives damaged, or in the wrong order: no result of this job is right.",
                    "Report it with the output of allgrad doctor --json; try another version of "
                    "torch or of the backend.",
                )
            )
        else:
            findings.append(ok(name, f"{ended[0]['called']} collectives and gradients exact"))
        links = {link: row for end in ended.values() for link, row in end["links"][kind].items()}
        labelled = link_findings(links, hosts)
        findings += [replace(finding, about=f"{finding.about} ({kind})") for finding in labelled]
        if kind == "cpu":
            findings += clock_findings(links)
    return findings


def _absent(brought: Mapping[int, Any], size: int, when: str) -> list[Finding]:
    missing = set(range(size)) - set(brought)
    if not missing:
        return []
    return [
        problem(
            "ranks",
            f"{ranks_text(missing)} gone {when}",
            "They came, and did not answer before the deadline.",
            "Look at their output; a slow network needs a longer --deadline.",
        )
    ]


def _left_out(launch: Launch, findings: list[Finding], facts: dict[int, Facts]) -> Report:
    skipped = warning(
        "collectives",
        "not tried",
        "Ranks with a problem above would wait for each other.",
        "Fix the problem, and run allgrad doctor again.",
    )
    return Report(launch.by, launch.size, [*findings, skipped], facts)


def _orphaned(launch: Launch, meeting: Meeting, brought: dict[int, Any] | None) -> Report | None:
    """The report of the lowest rank that is left after rank 0 has gone."""
    if brought is None:
        return None
    facts = _facts_of(meeting.collect("facts", 0.0))
    return _left_out(launch, _absent(brought, launch.size, "after all had come"), facts)
