"""Other libraries' gathers replaced by ours: one module for each library, and what they share.

Imports ``losses``, ``collectives``, ``types``, ``_wire``, ``_core``, ``containers`` and ``errors``. A library
is imported by its own module here and by nothing else.
"""

from allgrad.integrations._joined_loss import JoinedLoss
from allgrad.integrations._rows import batch_weight

__all__ = ["JoinedLoss", "batch_weight"]
