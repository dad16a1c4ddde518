"""Late interaction (ColBERT, ColPali): InfoNCE over MaxSim scores, never all token scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import below_transforms
from allgrad.errors import InputError, ModeError, PieceMismatch, TensorError
from allgrad.losses._arguments.agreement import CallSpec, agree_and, grad_mode, no_values, require
from allgrad.losses._arguments.feature_checks import (
    check_number,
    check_options,
    number,
    options_text,
    require_device,
)
from allgrad.losses._arguments.packed import Packing, Part
from allgrad.losses._arguments.rank_args import FLOATING
from allgrad.losses._arguments.same_numbers import compared_numbers
from allgrad.losses._computed_on import computed_on
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._rows.global_mean import GlobalMean
from allgrad.losses._rows.row_losses import Chunk, parts_of, row_losses, weighted_sums
from allgrad.losses._rows.score_tile import MASKED, ScoreTile
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.losses._pairs.global_loss import GradReduction
    from allgrad.types import GroupLike

__all__ = ["maxsim_loss"]

TILE = (1024, 8192)  # tokens of queries and of documents whose scores exist at a time


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of different lengths, their tokens joined: (all tokens, width)."""

    tokens: Tensor
    lengths: list[int]
    first: int = 0  # the number of the first sample, among those of all ranks

    def chunks(self, most: int) -> list[Chunk[_Samples]]:
        """Consecutive samples that need at most so many tokens when they are padded."""
        groups: list[list[int]] = [[]]
        for length in self.lengths:
            if groups[-1] and max(*groups[-1], length) * (len(groups[-1]) + 1) > most:
                groups.append([])
            groups[-1].append(length)
        made, first = [], self.first
        tokens = parts_of(self.tokens, [sum(group) for group in groups])
        for group, x in zip(groups, tokens, strict=True):
            made.append(Chunk(partial(_Samples, lengths=group, first=first), (x,)))
            first += len(group)
        return made

    @property
    def common_length(self) -> int | None:
        """The length of all samples, if they have one."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    def padded(self) -> tuple[Tensor, Tensor | None]:
        """The tokens of (places, samples), flat, and which of these are real if not all are.

        Places come first: devices find the highest of some numbers faster where these are apart.
        """
        x, length = self.tokens, self.common_length
        if length is not None:
            return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(0, 1), None
        place, real = self.places()
        return x[place.flatten()] if len(x) else x.new_zeros(place.numel(), x.shape[1]), real

    def sums(self, of_tokens: Tensor) -> Tensor:
        """The sum over each sample's tokens."""
        if self.common_length is not None:
            by_sample: Tensor = of_tokens.unflatten(0, (len(self.lengths), self.common_length))
            return by_sample.sum(1)
        sums = of_tokens.new_zeros(len(self.lengths), of_tokens.shape[1])
        added: Tensor = sums.index_add(0, self.owners(), of_tokens)
        return added

    def places(self) -> tuple[Tensor, Tensor]:
        """For each place and sample, the token there, and whether there is one."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.tokens.device)
        place = torch.arange(max(self.lengths, default=0), device=self.tokens.device)[:, None]
        real = place < lengths
        return torch.where(real, lengths.cumsum(0) - lengths + place, 0), real

    def owners(self) -> Tensor:
        """The sample of each token."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.tokens.device)
        return torch.repeat_interleave(lengths)


@in_graphs
def maxsim_loss(
    query: Tensor | Sequence[Tensor],
    document: Tensor | Sequence[Tensor],
    scale: Tensor | float = 1.0,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    symmetric: bool = False,
    grad_reduction: GradReduction = "mean",
    group: GroupLike = None,
) -> Tensor:
    """Cross entropy of each query among the documents of all ranks, scored by late interaction.

        rank 0   query [ a a ]     document [ a a ]           loss of [ a a | b | c c c ]
        rank 1   query [ b ]       document [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   query [ c c c ]   document [ c c c ]         loss of [ a a | b | c c c ]

    The score of a query and a document is the sum over the query's tokens of the largest product
    with a token of the document (MaxSim). Query i and document i are a pair. Tokens are padded,
    (samples, tokens, width) with a mask that is True at real tokens, or a list of one (tokens,
    width) for each sample; padding is neither sent nor scored. ``symmetric`` takes the mean with the
    cross entropy of each document among the queries of all ranks.

    Gradient: exactly that of the joined batch, once the ranks' gradients are averaged
    (``grad_reduction="mean"``: DDP, FSDP) or summed (``"sum"``), of any order. Tokens that tie for
    the largest product share its gradient equally.

    Cost: the token scores of a chunk of queries and documents exist at a time, and are computed
    again in backward, unless there are at most 2 million (on a device 16 million). Forward sends the
    documents' tokens and lengths, after one small message unless the call is expected (``supcon_loss``), backward the gradients
    of the tokens; ``symmetric`` doubles what is sent, not the messages.
    """
    arguments: dict[str, object] = {"query": query, "query_mask": query_mask}
    arguments |= {"document": document, "document_mask": document_mask, "scale": scale}
    packed: list[_Samples] = []

    def check() -> CallSpec:
        packed[:] = [
            _pack("query", query, query_mask),
            _pack("document", document, document_mask),
        ]
        check_number("scale", scale)
        check_options(grad_reduction)
        q, d = packed
        if q.tokens.is_meta:
            raise ModeError(no_values("the lengths of all ranks' samples"))
        require_device({"document": d.tokens}, "query", q.tokens)
        require(
            len(q.lengths) == len(d.lengths),
            PieceMismatch,
            f"there are {len(q.lengths)} queries and {len(d.lengths)} documents.",
            "Give one document for each query on a rank; ranks may differ.",
        )
        require(
            q.tokens.shape[1] == d.tokens.shape[1] and q.tokens.dtype == d.tokens.dtype,
            PieceMismatch,
            "query and document differ in width or dtype.",
            "Project all tokens to the same width, in one dtype.",
        )
        same = {
            "width": q.tokens.shape[1],
            "dtype": q.tokens.dtype,
            **grad_mode(),
            "options": options_text(symmetric=bool(symmetric), grad_reduction=grad_reduction),
            **compared_numbers({"scale": scale}, q.tokens),
        }
        return CallSpec(same, (len(q.lengths), len(q.tokens), len(d.tokens)))

    def compute(agreed: Agreement) -> Tensor:
        q, d = packed
        pairs, query_tokens, document_tokens = (agreed.column(i) for i in range(3))
        if not sum(pairs):
            raise InputError("maxsim_loss: no rank has a pair.\nGive at least one rank a pair.")
        first, (query_lengths, document_lengths) = sum(pairs[: agreed.rank]), (q.lengths, d.lengths)

        parts = _parts(d, document_tokens, pairs)
        each = len(parts)
        if symmetric:
            parts += _parts(q, query_tokens, pairs)

        def sums(
            joined: list[Tensor],
            constants: Sequence[Tensor],  # noqa: ARG001  none
            q: Tensor,
            d: Tensor,
            factor: Tensor,
        ) -> Tensor:
            documents = _of_all_ranks(joined[:each], document_lengths)
            queries = _Samples(q, query_lengths, first)
            losses = _direction(queries, documents, factor, queries_are_rows=True)
            if symmetric:
                rows = _Samples(d, document_lengths, first)
                columns = _of_all_ranks(joined[each:], query_lengths)
                losses = (losses + _direction(rows, columns, factor, queries_are_rows=False)) / 2
            return weighted_sums(losses, None)

        mean = GlobalMean(
            "maxsim_loss", agreed.rank, Packing(parts, agreed), sums, grad_reduction, group
        )
        return mean(q.tokens, d.tokens, number(scale))

    return agree_and("maxsim_loss", arguments, check, group, compute)


def _parts(samples: _Samples, tokens: tuple[int, ...], pairs: tuple[int, ...]) -> list[Part]:
    """The tokens and lengths of this rank's samples; of one rank alone, the tokens."""
    if len(pairs) == 1:
        return [Part(samples.tokens, tokens)]
    make = partial(torch.tensor, dtype=torch.int64, device=samples.tokens.device)
    lengths = below_transforms(make, samples.lengths)
    return [Part(samples.tokens, tokens), Part(lengths, pairs, is_plain=True)]


def _of_all_ranks(joined: Sequence[Tensor], own: list[int]) -> _Samples:
    tokens, *lengths = joined
    return _Samples(tokens, lengths[0].tolist() if lengths else own)


def _direction(
    rows: _Samples, columns: _Samples, scale: Tensor, *, queries_are_rows: bool
) -> Tensor:
    """The losses of rows: of queries among documents, or of documents among queries."""
    wide = accumulator_dtype(rows.tokens.dtype)
    # Before they are cut: the gradients of chunks are added up.
    rows, columns = (replace(x, tokens=x.tokens.to(wide)) for x in (rows, columns))
    most = TILE if queries_are_rows else TILE[::-1]

    def make_tile(row: _Samples, column: _Samples, factor: Tensor) -> ScoreTile:
        scores = _maxsim(row, column) if queries_are_rows else _maxsim(column, row).T
        device = row.tokens.device
        index = torch.arange(len(row.lengths), device=device)[:, None] + row.first
        other = torch.arange(len(column.lengths), device=device) + column.first
        pair = index == other
        return ScoreTile(factor * scores, pair, ~pair, None)

    shared = scale.to(rows.tokens.device, wide).reshape(())
    return row_losses("pairs", rows.chunks(most[0]), columns.chunks(most[1]), make_tile, shared)


def _maxsim(queries: _Samples, documents: _Samples) -> Tensor:
    """The scores of a chunk of queries with a chunk of documents."""
    padded, real = documents.padded()
    # In float32 at least: rounded to 16 bits, products would tie where they do not.
    products = queries.tokens @ padded.T
    if not len(padded):  # no document in this chunk
        return queries.sums(products.sum(1, keepdim=True))[:, :0]
    products = products.unflatten(1, (-1, len(documents.lengths)))
    return queries.sums((products if real is None else torch.where(real, products, MASKED)).amax(1))


def _pack(name: str, x: Tensor | Sequence[Tensor], mask: Tensor | None) -> _Samples:
    """Tokens without padding."""
    if isinstance(x, Tensor) and x.is_nested:
        x = x.unbind()
    if not isinstance(x, Tensor):
        return _pack_list(name, x, mask)
    require(
        x.dim() == 3 and x.dtype in FLOATING,
        TensorError,
        f"{name} is not a floating-point tensor of 3 dimensions.",
        "Give it as (samples, tokens, width), or as a list of (tokens, width).",
    )
    if mask is None:
        lengths = [x.shape[1]] * len(x)
        tokens = x.flatten(0, 1)
    else:
        require(
            isinstance(mask, Tensor) and mask.shape == x.shape[:2],
            PieceMismatch,
            f"{name}_mask has another shape than {name}.",
            f"Give it as (samples, tokens), True at the real tokens of {name}.",
        )
        require(
            mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()),
            InputError,
            f"{name}_mask has other values than 0 and 1.",
            f"Give True, or 1, at the real tokens of {name}; of a mask that is added to scores, mask == 0.",
        )
        mask = mask.bool()
        lengths = mask.sum(1).tolist()
        tokens = x[mask]
    return _with_tokens(name, _Samples(tokens, lengths))


def _pack_list(name: str, xs: Sequence[Tensor], mask: Tensor | None) -> _Samples:
    require(
        mask is None,
        InputError,
        f"{name}_mask is given, but {name} is a list.",
        "Give a mask with padded tokens only.",
    )
    require(
        len(xs),
        InputError,
        f"{name} is an empty list.",
        "A rank without samples gives a tensor of shape (0, 0, width).",
    )
    require(
        all(isinstance(x, Tensor) and x.dim() == 2 and x.dtype in FLOATING for x in xs)
        and len({(x.shape[1], x.dtype) for x in xs}) == 1,
        TensorError,
        f"{name} is not a list of floating-point (tokens, width) of one width and dtype.",
        "Give each sample as (tokens, width).",
    )
    tokens = computed_on(xs[0].device, torch.cat, list(xs))
    return _with_tokens(name, _Samples(tokens, [len(x) for x in xs]))


def _with_tokens(name: str, samples: _Samples) -> _Samples:
    require(
        all(samples.lengths),
        InputError,
        f"a {name} has no token.",
        "Give each query and each document at least one token.",
    )
    return samples
