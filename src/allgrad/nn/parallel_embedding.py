"""An embedding whose vocabulary is split among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from allgrad._core.held_group import HoldsGroup
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import InputError, TensorError
from allgrad.nn._ranks import (
    feature_sizes,
    find_place,
    refuse,
    require_layer,
    require_own_piece,
    require_tensors,
)

if TYPE_CHECKING:
    from allgrad.types import GroupLike, Sizes

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(HoldsGroup, nn.Module):
    """An embedding of which each rank holds the vectors of some words.

        rank 0   words 0 1     ids [ 3 0 4 ]         [ e3 e0 e4 ]
        rank 1   words 2 3     ids [ 3 0 4 ]  --->   [ e3 e0 e4 ]
        rank 2   word  4       ids [ 3 0 4 ]         [ e3 e0 e4 ]

    Every rank passes the same ids, and gets all their vectors; with ``sequence_dim`` its tokens
    of them, a piece along that dim.

    Gradient: every rank does the same work with the vectors, so the loss counts once: the sum has
    ``grad="same"``, and each rank keeps the gradients of its own words. With ``sequence_dim`` each
    rank works on its own tokens: the sum is scattered, and gradients are gathered.

        rank 0   E0 -> its words             [ E3 E0 E4 ]
        rank 1   E3 -> its words      <---   [ E3 E0 E4 ]
        rank 2   E4 -> its words             [ E3 E0 E4 ]

    Seeded alike, the ranks together have the vectors that a plain embedding has with this seed.
    ``ragged=True`` allows a vocabulary that the ranks do not divide.

    Cost: forward one collective as large as the vectors; backward none, with ``sequence_dim`` one.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = find_place("VocabParallelEmbedding", group)
        self.sizes = feature_sizes(
            "VocabParallelEmbedding", "num_embeddings", num_embeddings, place.world, ragged=ragged
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_dim, self.group = sequence_dim, group
        plain = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.padding_idx = plain.padding_idx
        self.first = sum(self.sizes[: place.rank])
        self._take(plain, place.rank)

    @classmethod
    def from_plain(
        cls,
        layer: nn.Embedding,
        *,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
    ) -> VocabParallelEmbedding:
        """Take this rank's words of a plain embedding, which is the same on every rank."""
        require_layer(cls, layer, nn.Embedding)
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise InputError(
                "VocabParallelEmbedding: max_norm, scale_grad_by_freq and sparse are not supported.\n"
                "Give an embedding without them."
            )
        made = cls(
            layer.num_embeddings,
            layer.embedding_dim,
            layer.padding_idx,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
            device="meta",
        )
        made._take(layer, find_place("VocabParallelEmbedding", group).rank)
        return made

    def _take(self, plain: nn.Embedding, rank: int) -> None:
        piece = plain.weight.detach().split(self.sizes)[rank].clone()
        self.weight = nn.Parameter(piece, plain.weight.requires_grad)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight anew; seeded alike, the ranks have that of a plain layer with this seed."""
        own, words = self.weight, (self.num_embeddings, self.embedding_dim, self.padding_idx)
        plain = nn.Embedding(*words, device=own.device, dtype=own.dtype)
        rank = find_place("VocabParallelEmbedding", self.group).rank
        own.copy_(plain.weight.split(self.sizes)[rank])

    def extra_repr(self) -> str:
        """The plain layer's, and the words of each rank."""
        return f"{self.num_embeddings}, {self.embedding_dim}, sizes={self.sizes}"

    @torch.no_grad()
    def to_plain(self) -> nn.Embedding:
        """Give every rank the plain embedding, gathered from all pieces."""
        made = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )
        weight = all_gather(self.weight, sizes=self.sizes, group=self.group)
        made.weight = nn.Parameter(weight, self.weight.requires_grad)
        return made

    def forward(self, ids: Tensor, *, sizes: Sizes = None) -> Tensor:
        """Look up the vectors of the ids.

        ``sizes`` are each rank's tokens along ``sequence_dim``; as even as possible unless given.
        """
        require_own_piece("VocabParallelEmbedding", self.group, self.sizes, self.weight.shape[0])
        require_tensors("VocabParallelEmbedding", self.group, ids=ids)
        vectors = self._own_vectors(ids)
        if self.sequence_dim is None:
            return all_reduce(vectors, group=self.group, grad="same")
        return reduce_scatter(vectors, self.sequence_dim, sizes=sizes, group=self.group)

    def _own_vectors(self, ids: Tensor) -> Tensor:
        """The vectors of this rank's words, zeros for others."""
        rows = self.weight.shape[0]
        weight = self.weight if rows else self.weight.new_zeros(1, self.embedding_dim)
        own = (ids >= self.first) & (ids < self.first + rows)
        known = (ids >= 0) & (ids < self.num_embeddings)
        # An unknown id is out of range on every rank: torch's lookup notices it without a wait.
        at = torch.where(own, ids - self.first, torch.where(known, 0, len(weight)))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        try:
            found = embedding(at, weight, padding)
        except (IndexError, RuntimeError) as error:
            found, reason = None, error
        if found is None:
            refuse("VocabParallelEmbedding", self.group, self._problem(ids, reason))
        found = found.masked_fill(~own.unsqueeze(-1), 0)
        return found if rows else found + self.weight.sum()

    def _problem(self, ids: Tensor, reason: Exception) -> InputError:
        """What is wrong with ids that torch's lookup refused."""
        if isinstance(reason, IndexError):
            return InputError(
                f"VocabParallelEmbedding: ids are from {int(ids.min())} to {int(ids.max())}, but the "
                f"vocabulary has {self.num_embeddings} words.\nGive ids from 0 to "
                f"{self.num_embeddings - 1}."
            )
        if ids.dtype not in {torch.int64, torch.int32}:
            return TensorError(
                f"VocabParallelEmbedding: ids are {ids.dtype}.\nGive int64 or int32."
            )
        raise reason
