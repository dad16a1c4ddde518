"""Linear layers and embeddings split among ranks: the plain layer, and back."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allgrad as ag
from allgrad.errors import InputError, RankRaised, SizesError, TensorError
from allgrad.nn import (
    ColumnParallelLinear,
    HaloConv1d,
    HaloConv2d,
    HaloConv3d,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from counting import Counted
from exactness import leaf, loss, place, random
from nn.twins import LENGTHS, close, derivatives, each, pieces_of
from places import everywhere, on
from refusals import raises_everywhere

WIDTHS = {"divides": 12, "ragged": 7, "empty": 2}


def plain_mlp(hidden):
    torch.manual_seed(5)
    return nn.Linear(4, hidden).double(), nn.Linear(hidden, 3).double()


def own(whole, dim, sizes, rank):
    return whole.split(list(sizes), dim)[rank]


def mlp(group, hidden, bias):
    """The same loss on every rank: it counts once."""
    rank, _ = place(group)
    one, two = plain_mlp(hidden)
    if not bias:
        one.bias = two.bias = None
    first = ColumnParallelLinear.from_plain(one, ragged=True, group=group)
    second = RowParallelLinear.from_plain(two, ragged=True, group=group)
    x, z = leaf(random((2, 5, 4), 1)), leaf(random((2, 5, 4), 1))
    wanted, y = two(one(x).tanh()), second(first(z).tanh())
    close(y, wanted, "the output")

    whole = [x, one.weight, two.weight, *([one.bias, two.bias] if bias else [])]
    pieces = [z, first.weight, second.weight, *([first.bias, second.bias] if bias else [])]
    dims = [None, 0, 1, 0, None][: len(whole)]

    def check(got, want, what):
        for g, w, dim in zip(got, want, dims, strict=True):
            close(g, w if dim is None else own(w, dim, first.sizes, rank), what)

    want = derivatives(loss(wanted, 0), whole, graph=True)
    got = derivatives(loss(y, 0), pieces, graph=True)
    check(got, want, "the gradient")
    # A second loss must be the same on every rank as well: pieces are joined first.
    joined = [
        g if dim is None else ag.all_gather(g, dim, sizes=first.sizes, group=group, grad="same")
        for g, dim in zip(got, dims, strict=True)
    ]
    want = derivatives(sum(loss(g, 50) for g in want), whole)
    got = derivatives(sum(loss(g, 50) for g in joined), pieces)
    check(got, want, "the second derivative")


@pytest.mark.one_in(4)
@everywhere
def test_mlp_everywhere(where):
    on(where, each, mlp, [(hidden, hidden != 7) for hidden in WIDTHS.values()])


def tokens(group, kind):
    """Sequence parallel: tokens are split outside, features inside; the losses differ by rank."""
    rank, world = place(group)
    sizes = LENGTHS[kind][:world]
    one, two = plain_mlp(7)
    options = {"sequence_dim": 1, "ragged": True, "group": group}
    first = ColumnParallelLinear.from_plain(one, **options)
    second = RowParallelLinear.from_plain(two, **options)
    everyone = [leaf(x) for x in pieces_of(world, kind, (2, 0, 4), 1)]
    z = leaf(everyone[rank])
    wanted = two(one(torch.cat(everyone, 1)).tanh()).split(sizes, 1)
    y = second(first(z).tanh(), sizes=sizes)
    close(y, wanted[rank], "the output")

    whole = [*everyone, one.weight, one.bias, two.weight, two.bias]
    pieces = [z, first.weight, first.bias, second.weight, second.bias]

    def parts(found):
        """What each rank has of the derivatives."""
        *xs, w1, b1, w2, b2 = found
        return [
            [
                x,
                own(w1, 0, first.sizes, r),
                own(b1, 0, first.sizes, r),
                own(w2, 1, first.sizes, r),
                b2,
            ]
            for r, x in enumerate(xs)
        ]

    want = derivatives(sum(loss(w, r) for r, w in enumerate(wanted)), whole, graph=True)
    got = derivatives(loss(y, rank), pieces, graph=True)
    for g, w in zip(got, parts(want)[rank], strict=True):
        close(g, w, "the gradient")
    again = sum(loss(g, 50 + r) for r, one in enumerate(parts(want)) for g in one)
    # The bias's gradient is one value that all ranks hold: share it with losses that differ.
    got[-1] = ag.share(got[-1], group=group)
    got = derivatives(sum(loss(g, 50 + rank) for g in got), pieces)
    for g, w in zip(got, parts(derivatives(again, whole))[rank], strict=True):
        close(g, w, "the second derivative")


@pytest.mark.one_in(4)
@everywhere
def test_sequence_parallel_everywhere(where):
    on(where, each, tokens, [(kind,) for kind in LENGTHS])


@pytest.mark.ranks(3)
def test_gathered_output_and_split_input(rank, world):
    one, two = plain_mlp(6)
    first = ColumnParallelLinear.from_plain(one, gather_output=True)
    second = RowParallelLinear.from_plain(two, split_input=True)
    x, z = leaf(random((5, 4), 1)), leaf(random((5, 4), 1))
    wanted, y = two(one(x).tanh()), second(first(z).tanh())
    close(y, wanted, "the output")
    close(*(derivatives(loss(v, 0), [at])[0] for v, at in ((y, z), (wanted, x))), "the gradient")


@pytest.mark.ranks(3)
def test_to_plain_is_the_way_back(rank, world):
    one, two = plain_mlp(7)
    table = nn.Embedding(8, 3, padding_idx=-1)
    for kind, plain in (
        (ColumnParallelLinear, one),
        (RowParallelLinear, two),
        (VocabParallelEmbedding, table),
    ):
        back = kind.from_plain(plain, ragged=True).to_plain()
        assert type(back) is type(plain)
        assert repr(back) == repr(plain)
        for key, value in plain.state_dict().items():
            assert torch.equal(back.state_dict()[key], value), key
            assert back.get_parameter(key).requires_grad


@pytest.mark.parametrize("frozen", [{"weight"}, {"bias"}, {"weight", "bias"}])
@pytest.mark.ranks(3)
def test_frozen_parameters_stay_frozen(rank, world, frozen):
    def trained(layer):
        return {name for name, p in layer.named_parameters() if p.requires_grad}

    for kind, plain in (
        (ColumnParallelLinear, nn.Linear(4, 7)),
        (RowParallelLinear, nn.Linear(7, 4)),
        (VocabParallelEmbedding, nn.Embedding(7, 4)),
    ):
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name not in frozen)
        ours = kind.from_plain(plain, ragged=True)
        assert trained(ours) == trained(plain)
        ours.reset_parameters()
        assert trained(ours) == trained(ours.to_plain()) == trained(plain)


@pytest.mark.ranks(2)
def test_made_with_one_seed_it_is_the_plain_layer(rank, world):
    for kind, plain, sizes in (
        (ColumnParallelLinear, nn.Linear, (4, 6)),
        (RowParallelLinear, nn.Linear, (4, 6)),
        (VocabParallelEmbedding, nn.Embedding, (4, 6)),
    ):
        torch.manual_seed(3)
        made = kind(*sizes).to_plain()
        torch.manual_seed(3)
        for a, b in zip(made.parameters(), plain(*sizes).parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.ranks(2)
def test_parameters_can_be_drawn_anew(rank, world):
    """As on the meta device: memory first, then numbers, in the parameters that an optimizer holds."""
    torch.manual_seed(3)
    plain = nn.Linear(4, 6), nn.Linear(6, 4), nn.Embedding(8, 3, padding_idx=1)
    ours = (
        ColumnParallelLinear(4, 6, device="meta"),
        RowParallelLinear(6, 4, device="meta"),
        VocabParallelEmbedding(8, 3, padding_idx=1, device="meta"),
    )
    held = [list(layer.to_empty(device="cpu").parameters()) for layer in ours]
    torch.manual_seed(3)
    for layer, twin, parameters in zip(ours, plain, held, strict=True):
        layer.reset_parameters()
        assert list(map(id, layer.parameters())) == list(map(id, parameters))
        for got, want in zip(layer.to_plain().parameters(), twin.parameters(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.ranks(2)
def test_under_autocast_as_the_plain_layer(rank, world, sequence_dim):
    torch.manual_seed(5)
    x, ours = torch.randn(2, 4), [ColumnParallelLinear(4, 6), RowParallelLinear(6, 4)]
    ours[1].sequence_dim = sequence_dim
    plain = [layer.to_plain() for layer in ours]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours[1](ours[0](x))
        whole = plain[1](plain[0](x))
    wanted = whole if sequence_dim is None else whole[rank : rank + 1]
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)
    y.float().square().sum().backward()
    whole.float().square().sum().backward()
    for layer, twin in zip(ours, plain, strict=True):
        got = ag.all_gather(layer.weight.grad, layer.split_dim, sizes="equal")
        assert (got - twin.weight.grad).norm() < 0.02 * twin.weight.grad.norm()


@pytest.mark.ranks(2)
def test_messages(rank, world):
    one, two = plain_mlp(6)
    x = leaf(random((5, 4), 1))
    with Counted() as calls:
        y = RowParallelLinear.from_plain(two)(ColumnParallelLinear.from_plain(one)(x))
        assert calls == ["all_reduce"]
        y.sum().backward()
        assert calls == ["all_reduce", "all_reduce"]


@pytest.mark.ranks(2)
def test_compiled_without_graph_breaks(rank, world):
    one, two = plain_mlp(6)
    first = ColumnParallelLinear.from_plain(one, sequence_dim=0)
    second = RowParallelLinear.from_plain(two, sequence_dim=0)
    everyone = [leaf(x) for x in pieces_of(world, "ragged", (0, 4), 0)]
    sizes = LENGTHS["ragged"][:world]
    z = leaf(everyone[rank])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        return second(first(x, sizes=sizes).tanh(), sizes=sizes)

    wanted = two(one(torch.cat(everyone)).tanh()).split(sizes)
    y = run(z)
    close(y, wanted[rank], "the output")
    want = derivatives(sum(loss(w, r) for r, w in enumerate(wanted)), everyone)
    close(derivatives(loss(y, rank), [z])[0], want[rank], "the gradient")


def lookup(group, words, sequence):
    rank, world = place(group)
    torch.manual_seed(2)
    plain = nn.Embedding(words, 3, padding_idx=1, dtype=torch.float64)
    with torch.no_grad():
        plain.weight[1] = 0.5
    dim = 1 if sequence else None
    ours = VocabParallelEmbedding.from_plain(plain, sequence_dim=dim, ragged=True, group=group)
    ids = torch.randint(words, (2, 7), generator=torch.Generator().manual_seed(4))
    sizes = [p.shape[1] for p in ids.tensor_split(world, 1)]
    wanted = plain(ids).split(sizes, 1) if sequence else [plain(ids)] * world
    y = ours(ids)
    close(y, wanted[rank], "the output")
    seeds = range(world) if sequence else [0]
    want = derivatives(sum(loss(wanted[r], r) for r in seeds), [plain.weight], graph=True)[0]
    got = derivatives(loss(y, rank if sequence else 0), [ours.weight], graph=True)[0]
    close(got, own(want, 0, ours.sizes, rank), "the gradient")
    again = sum(loss(w, 50 + r) for r, w in enumerate(want.split(ours.sizes)))
    second = derivatives(loss(got, 50 + rank), [ours.weight])[0]
    close(second, own(derivatives(again, [plain.weight])[0], 0, ours.sizes, rank), "the second")


@pytest.mark.one_in(4)
@everywhere
def test_embedding_everywhere(where):
    on(where, each, lookup, list(product(WIDTHS.values(), (False, True))))


@pytest.mark.ranks(3)
def test_features_that_do_not_divide(rank, world):
    for make, name in (
        (lambda: ColumnParallelLinear(4, 7), "out_features=7"),
        (lambda: RowParallelLinear(7, 4), "in_features=7"),
        (lambda: VocabParallelEmbedding(7, 4), "num_embeddings=7"),
    ):
        raises_everywhere(SizesError, make, name, "3 ranks", "ragged=True")


def in_pieces(group):
    """Layers in pieces of six features or words, and what each takes from every rank."""
    one, two = nn.Linear(4, 6), nn.Linear(6, 4)
    column, row = ColumnParallelLinear.from_plain, RowParallelLinear.from_plain
    return [
        (column(one, group=group), torch.ones(2, 4)),
        (column(one, gather_output=True, group=group), torch.ones(2, 4)),
        (row(two, group=group), torch.ones(2, 6)),
        (row(two, split_input=True, group=group), torch.ones(2, 6)),
        (VocabParallelEmbedding.from_plain(nn.Embedding(6, 4), group=group), torch.arange(6)),
    ]


@pytest.mark.ranks(3)
def test_layer_made_in_a_group_of_another_size(rank, world):
    """Made before init_process_group it has one piece, which the ranks would add up."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for before, after, sizes in ((alone, None, "sizes=(6,)"), (None, alone, "sizes=(2, 2, 2)")):
        now = f"rank {rank} of 3" if after is None else "rank 0 of 1"
        for layer, x in in_pieces(before):
            layer.group = after
            parts = type(layer).__name__, sizes, now, "after init_process_group"
            raises_everywhere(SizesError, partial(layer, x), *parts)
            with torch.no_grad():
                raises_everywhere(SizesError, partial(layer, x), *parts)
            with ag.checked():
                raises_everywhere(SizesError, partial(layer, x), *parts)


@pytest.mark.ranks(3)
def test_piece_of_another_rank(rank, world):
    """As when every rank loads the layer that one rank saved."""
    plain = nn.Linear(7, 4)
    layer = RowParallelLinear.from_plain(plain, ragged=True)
    x = torch.ones(2, 7)
    if rank == 1:
        layer.weight = nn.Parameter(plain.weight[:, :3].detach().clone())
    wanted, words = (SizesError, "a piece of 3 .* rank 1 of 3") if rank == 1 else (RankRaised, "1")
    with ag.checked(), pytest.raises(wanted, match=words):
        layer(x.split(layer.sizes, 1)[rank])


@pytest.mark.ranks(3)
def test_unknown_word(rank, world):
    table = VocabParallelEmbedding(6, 4)
    for wrong in (6, -1):
        ids = torch.tensor([0, wrong, 3])
        raises_everywhere(InputError, lambda ids=ids: table(ids), "6 words", f"{wrong}")


def test_embedding_that_cannot_be_split_exactly():
    with pytest.raises(InputError, match="max_norm"):
        VocabParallelEmbedding.from_plain(nn.Embedding(4, 2, max_norm=1.0))


def test_ids_that_are_not_whole_numbers():
    with pytest.raises(TensorError, match=r"ids are torch.float32.\nGive int64 or int32"):
        VocabParallelEmbedding(6, 4)(torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        (ColumnParallelLinear, "Linear"),
        (RowParallelLinear, "Linear"),
        (VocabParallelEmbedding, "Embedding"),
        (HaloConv2d, "Conv2d"),
    ],
)
def test_layer_of_another_kind(ours, wanted):
    with pytest.raises(InputError, match=rf"{ours.__name__}.*takes an nn.{wanted}, not Conv1d"):
        ours.from_plain(nn.Conv1d(2, 2, 3))


KINDS = {
    ColumnParallelLinear: (nn.Linear, nn.LazyLinear, (4, 6)),
    RowParallelLinear: (nn.Linear, nn.LazyLinear, (4, 6)),
    VocabParallelEmbedding: (nn.Embedding, None, (4, 6)),
    HaloConv1d: (nn.Conv1d, nn.LazyConv1d, (4, 6, 1)),
    HaloConv2d: (nn.Conv2d, nn.LazyConv2d, (4, 6, 1)),
    HaloConv3d: (nn.Conv3d, nn.LazyConv3d, (4, 6, 1)),
}


@pytest.mark.filterwarnings("ignore")  # old weight_norm is deprecated
@pytest.mark.parametrize("ours", KINDS)
def test_layer_that_does_more_than_a_plain_one(ours):
    plain, lazy, sizes = KINDS[ours]

    class Doubled(plain):
        def forward(self, x):
            return 2 * super().forward(x)

    named = f"{ours.__name__}.from_plain: a "
    with pytest.raises(InputError, match=f"{named}Doubled has a forward of its own"):
        ours.from_plain(Doubled(*sizes))
    for norm in (
        *(nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm),
        *(nn.utils.weight_norm, nn.utils.spectral_norm),
    ):
        with pytest.raises(InputError, match=f"{named}.*parameters that are computed"):
            ours.from_plain(norm(plain(*sizes)))
    if lazy is not None:
        with pytest.raises(InputError, match=f"{named}{lazy.__name__} does not know its features"):
            ours.from_plain(lazy(*sizes[1:]))


def test_convolution_that_changes_what_forward_calls():
    class Rounded(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight.round(), bias)

    with pytest.raises(InputError, match="a Rounded has a forward of its own"):
        HaloConv1d.from_plain(Rounded(2, 2, 1))


@pytest.mark.parametrize("ours", KINDS)
def test_layer_that_adds_nothing_to_forward(ours):
    plain, lazy, sizes = KINDS[ours]

    class Named(plain):
        """Only drawn in another way."""

        def reset_parameters(self):
            nn.init.constant_(self.weight, 3.0)

    made = ours.from_plain(Named(*sizes))
    assert made.weight.unique().tolist() == [3.0]
    if lazy is not None:
        known = lazy(*sizes[1:])
        known(torch.ones(1, 4, *getattr(known, "kernel_size", ())))
        assert torch.equal(ours.from_plain(known).weight, known.weight)
    if isinstance(made, plain):
        assert ours.from_plain(made).weight is made.weight
