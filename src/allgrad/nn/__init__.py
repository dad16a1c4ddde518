"""Layers made of collectives: each gives what the plain layer gives in one process.

Imports ``collectives``, ``types``, ``_autograd``, ``_wire``, ``_core`` and ``errors``.
"""

from allgrad.nn.experts import Dispatched, combine, dispatch
from allgrad.nn.gathered_attention import gathered_attention
from allgrad.nn.halo import halo_exchange
from allgrad.nn.halo_conv import HaloConv1d, HaloConv2d, HaloConv3d
from allgrad.nn.minibatch_stddev import minibatch_stddev
from allgrad.nn.parallel_embedding import VocabParallelEmbedding
from allgrad.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from allgrad.nn.ring_attention import ring_attention
from allgrad.nn.sync_batch_norm import SyncBatchNorm, convert

__all__ = [
    "ColumnParallelLinear",
    "Dispatched",
    "HaloConv1d",
    "HaloConv2d",
    "HaloConv3d",
    "RowParallelLinear",
    "SyncBatchNorm",
    "VocabParallelEmbedding",
    "combine",
    "convert",
    "dispatch",
    "gathered_attention",
    "halo_exchange",
    "minibatch_stddev",
    "ring_attention",
]
