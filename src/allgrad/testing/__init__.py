"""Run code on real ranks, and check its gradients.

Imports ``nn``, ``_wire`` (to start worlds), ``containers`` and ``errors``; needs ``allgrad[testing]``.
"""

from allgrad.testing.checks import (
    GradientMismatch,
    NotAdjoint,
    adjoint_check,
    gradcheck,
    gradgradcheck,
)
from allgrad.testing.failures import RankError, RankFailed, RanksStuck
from allgrad.testing.hosts import Hosts, HostsUnavailable, why_no_hosts
from allgrad.testing.ranks import run_ranks
from allgrad.testing.serialization import CannotShip
from allgrad.testing.step_parity.mistakes import Mistake
from allgrad.testing.step_parity.report import ParityReport, parity

__all__ = [
    "CannotShip",
    "GradientMismatch",
    "Hosts",
    "HostsUnavailable",
    "Mistake",
    "NotAdjoint",
    "ParityReport",
    "RankError",
    "RankFailed",
    "RanksStuck",
    "adjoint_check",
    "gradcheck",
    "gradgradcheck",
    "parity",
    "run_ranks",
    "why_no_hosts",
]
