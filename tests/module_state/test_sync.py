"""sync: every rank ends with the state of one of them, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import allgrad as ag
from allgrad._wire import primitives as wire
from allgrad.errors import GroupError, InputError, TensorError
from allgrad.module_state import StateMismatch, compare, free_storage, sync, verify


def random_like(x, seed):
    """Any bits, the same for the same seed: NaNs and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (x.nbytes,), generator=generator, dtype=torch.uint8)
    if x.dtype == torch.bool:
        raw %= 2
    return raw.view(x.dtype).view(x.shape)


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8).tolist()


class Mixed(nn.Module):
    """Tied, transposed, scalar, empty, of many dtypes, not persistent."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.empty(4, 3).t())
        self.brain = nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.frozen = nn.Parameter(torch.empty(2, dtype=torch.complex128), requires_grad=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
        self.register_buffer("byte", torch.empty(1, dtype=torch.float8_e4m3fn))
        self.register_buffer("gaps", torch.empty(4, 6, dtype=torch.float64)[::2, 1::2])

    def held(self):
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def randomise(self, rank):
        with torch.no_grad():
            for seed, x in enumerate(self.held().values()):
                x.copy_(random_like(x, seed + 100 * rank))
        return self


def counted(monkeypatch):
    calls = []
    start = wire.overwrite
    monkeypatch.setattr(wire, "overwrite", lambda *args: calls.append(args[1]) or start(*args))
    return calls


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bucket_mb", [8, 1e-6, 60 / 2**20])
def test_every_rank_gets_the_bits_of_src(rank, world, bucket_mb):
    src = world - 1
    mine = Mixed().randomise(rank)
    strides = {name: x.stride() for name, x in mine.held().items()}
    needs = {name: x.requires_grad for name, x in mine.held().items()}
    addresses = {name: x.data_ptr() for name, x in mine.held().items()}
    mine.scalar.grad = torch.tensor(float(rank))
    sync(mine, src, bucket_mb=bucket_mb)
    for name, want in Mixed().randomise(src).held().items():
        got = mine.held()[name]
        assert bits(got) == bits(want), name
        assert got.stride() == strides[name]
        assert got.requires_grad == needs[name]
        assert got.data_ptr() == addresses[name]
    assert mine.scalar.grad == rank
    assert mine.last.weight is mine.first.weight


@pytest.mark.ranks(3)
def test_training_goes_on_afterwards(rank):
    torch.manual_seed(rank)
    layer = nn.Linear(2, 1)
    sync(layer, 1)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[1, 1]]
    loss = layer(torch.ones(1, 2, requires_grad=True)).sum()
    sync(layer, 1)
    if rank == 1:
        loss.backward()  # nothing was written here
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 2])
def test_autograd_sees_what_was_written(rank, count):
    held = {str(i): torch.full((3,), float(rank), requires_grad=True) for i in range(count)}
    losses = [x.square().sum() for x in held.values()]
    versions = [x._version for x in held.values()]
    sync(held, 1)
    assert all(
        (x._version > v) is (rank == 0) for x, v in zip(held.values(), versions, strict=True)
    )
    for loss in losses:
        if rank == 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 2])
def test_conjugate_views_are_written(rank, count):
    def state(seed):
        numbers = [
            random_like(torch.zeros(3, dtype=torch.complex64), seed + i) for i in range(count)
        ]
        return {f"{i}": x.conj() for i, x in enumerate(numbers)} | {
            f"imag {i}": x.conj().imag for i, x in enumerate(numbers)
        }

    held = state(10 * rank)
    sync(held)
    for name, want in state(0).items():
        assert torch.equal(held[name], want), name


@pytest.mark.ranks(3)
def test_a_single_element_may_have_any_stride(rank):
    column = torch.full((4, 5), float(rank))[:, 0]
    held = {"x": column[:1] if rank == 1 else torch.full((1,), float(rank))}
    sync(held, 2)
    assert held["x"].tolist() == [2.0]
    verify(held)


@pytest.mark.ranks(3)
def test_pending_buckets_share_no_memory(rank):
    state = {f"{i:03}": torch.full((100 + i,), float(rank * 1000 + i)) for i in range(64)}
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        sync(state, 1, bucket_mb=2000 / 2**20)
    assert len({x.data_ptr() for x in calls[:-1]}) == 2
    assert all(x.eq(1000 + int(i)).all() for i, x in state.items())


def one_broadcast_a_bucket(rank, bucket_mb, expected):
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        state = {f"a{i:02}": torch.full((256,), float(rank)) for i in range(20)}
        state["b"] = torch.full((2048,), float(rank))
        sync(state, 2, bucket_mb=bucket_mb)
    assert [x.nbytes / 1024 for x in calls] == expected
    assert all(x.eq(2).all() for x in state.values())


@pytest.mark.ranks(3)
def test_one_broadcast_for_each_bucket(rank):
    one_broadcast_a_bucket(rank, 8, [28])
    one_broadcast_a_bucket(rank, 5 / 1024, [5, 5, 5, 5, 8])


@pytest.mark.ranks(3)
def test_large_tensor_is_sent_alone_and_uncopied(rank):
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        module = nn.ParameterList([torch.full((300,), float(rank)), torch.full((2,), float(rank))])
        sync(module, bucket_mb=1 / 1024)
    assert [x.nbytes for x in calls] == [1200, 8]
    assert calls[0].data_ptr() == module[0].data_ptr()
    assert module[0].eq(0).all()


@pytest.mark.ranks(3)
def test_mixed_dtypes_leave_no_gaps(rank):
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        module = Mixed().randomise(rank)
        sync(module)
    assert [x.nbytes for x in calls] == [sum(x.nbytes for x in module.held().values())]


@pytest.mark.ranks(3)
def test_two_thousand_tensors(rank):
    module = nn.ParameterList(torch.full((i % 3,), rank + i / 4) for i in range(2000))
    sync(module, 1)
    assert all(p.eq(1 + i / 4).all() for i, p in enumerate(module))


@pytest.mark.ranks(3)
def test_order_of_building_does_not_matter(rank):
    names = ["a", "b", "c"]
    state = {name: torch.full((2,), float(rank)) for name in names[rank:] + names[:rank]}
    module = nn.Module()
    for name, x in state.items():
        module.register_parameter(name, nn.Parameter(x + 10))
    sync(state, 2)
    sync(module, 2)
    assert all(x.eq(2).all() for x in state.values())
    assert all(p.eq(12).all() for p in module.parameters())


@pytest.mark.ranks(3)
def test_what_is_ignored_stays(rank):
    def build():
        return nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1), nn.ReLU())).apply(
            fill
        )

    def fill(module):
        for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            x.data.fill_(rank)

    module = build()
    sync(module, 2, ignore=["0.bias", "1.0", "1.1"])
    got = {name: x.item() for name, x in module.state_dict().items()}
    assert got.pop("0.weight") == 2
    assert set(got.values()) == {rank}
    module = build()
    sync(module, 2, buffers=False, ignore=["1.0.running_mean"])
    assert [x.item() for x in module.parameters()] == [2] * 4
    assert [x.item() for x in module.buffers()] == [rank] * 3
    module = Mixed().randomise(rank)
    sync(module, 2, ignore=["first"])  # under its other name it is not ignored
    assert bits(module.first.weight) == bits(Mixed().randomise(2).last.weight)


@pytest.mark.ranks(4)
def test_src_is_a_rank_of_the_group(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    module = nn.ParameterList([torch.tensor(float(rank))])
    sync(module, 1, group=groups[rank % 2])
    assert module[0].item() == (3 if rank % 2 else 2)


@pytest.mark.ranks(3)
def test_a_src_outside_of_the_group_on_one_rank_raises_on_all_in_checked_mode(rank):
    module = nn.ParameterList([torch.tensor(float(rank))])
    with ag.checked():
        raises_everywhere(
            GroupError, lambda: sync(module, 7 if rank == 1 else 0), "src=7", "rank 1: not ready"
        )
    assert module[0].item() == rank


@pytest.mark.ranks(4)
def test_same_pieces_of_dtensors_are_synced(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces"))
    whole = torch.arange(6.0).view(3, 2)
    piece = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    piece.to_local().add_(10 * mesh.get_coordinate()[0])
    module = nn.ParameterDict({"w": nn.Parameter(piece)})
    sync(module, 1, group=(mesh, "copies"))
    want = whole.chunk(2)[mesh.get_coordinate()[1]] + 10
    assert torch.equal(module["w"].to_local(), want)
    raises_everywhere(
        StateMismatch, lambda: sync(module), "w\n", "rank 0: (3, 2) float32", "another piece"
    )
    assert torch.equal(module["w"].to_local(), want)


def raises_everywhere(error, call, *parts):
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert ag.all_gather(torch.tensor([rank])).tolist() == list(range(world))


@pytest.mark.ranks(3)
def test_other_shape_on_one_rank_raises_on_all_and_changes_none(rank):
    module = nn.ParameterDict(
        {"a": torch.full((2,), float(rank)), "b": torch.full((3 + (rank == 1),), float(rank))}
    )
    raises_everywhere(
        StateMismatch,
        lambda: sync(module),
        "1 differs:\nb\n  rank 0: (3,) float32 cpu\n  rank 1: (4,) float32 cpu   <- another shape\n",
        "or name what differs in ignore.",
    )
    assert module["a"].eq(rank).all()
    sync(module, ignore=["b"])
    assert module["a"].eq(0).all()


@pytest.mark.ranks(3)
def test_other_dtype_name_kind_or_tie_raises_on_all(rank):
    odd = rank == 2
    x = torch.zeros(2)
    raises_everywhere(
        StateMismatch,
        lambda: sync({"a": x.double() if odd else x}),
        "(2,) float64 cpu   <- another dtype",
    )
    raises_everywhere(
        StateMismatch, lambda: sync({"ab"[odd]: x}), "2 differ", "rank 2: missing", "<- only here"
    )
    module = nn.Module()
    module.register_buffer("a", x) if odd else module.register_parameter("a", nn.Parameter(x))
    raises_everywhere(StateMismatch, lambda: sync(module), "<- another kind")
    pair = {"a": x, "b": x if odd else x.clone()}
    raises_everywhere(StateMismatch, lambda: sync(pair), "tied to a cpu   <- tied in another way")


@pytest.mark.ranks(3)
def test_other_arguments_raise_on_all(rank):
    x = {"a": torch.zeros(2)}
    raises_everywhere(StateMismatch, lambda: sync(x, int(rank == 1)), "the call", "src=1")
    raises_everywhere(StateMismatch, lambda: sync(x, bucket_mb=1 + rank), "2097152")
    raises_everywhere(GroupError, lambda: sync(x, 3 if rank == 1 else 0), "src=3", "rank 0: ready")


@pytest.mark.one_in(4)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bad", [0, -1, "8", None, True, float("nan"), float("inf")])
def test_bucket_size_must_be_a_size(bad):
    raises_everywhere(InputError, lambda: sync(nn.Linear(1, 1), bucket_mb=bad), "is not a size")


@pytest.mark.ranks(1, 3)
def test_what_is_not_a_state_is_refused(world):
    raises_everywhere(InputError, lambda: sync([torch.zeros(1)]), "list is not a state")
    raises_everywhere(InputError, lambda: sync({1: torch.zeros(1)}), "keys of a dict of tensors")
    raises_everywhere(InputError, lambda: sync(nn.Linear(1, 1), ignore="bias"), "['bias']")
    raises_everywhere(
        InputError, lambda: sync(nn.Linear(1, 1), ignore=["bais"]), "ignore names nothing", "bais"
    )


def freed():
    x = torch.ones(2)
    view = x[1:]  # its address is not zero, though that of its memory is
    free_storage(x)
    return view


class Wrapper(torch.Tensor):
    """A tensor that has a shape and a device, and keeps its values elsewhere."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (1,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.one_in(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(2, device="meta"), "on the meta device"),
        (nn.UninitializedParameter, "not initialised yet"),
        (lambda: torch.eye(2).to_sparse(), "not dense"),
        (lambda: torch.zeros(1).expand(3), "expanded"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "of a dtype"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "not dense"),
        (freed, "without memory"),
        (lambda: nn.Parameter(freed()), "without memory"),
        (Wrapper, "without memory"),
    ],
    ids=[
        "meta",
        "lazy",
        "sparse",
        "expanded",
        "quantised",
        "nested",
        "freed",
        "freed parameter",
        "wrapper",
    ],
)
def test_tensor_without_bytes_of_its_own_is_named_on_every_rank(rank, world, make, why):
    odd = world - 1
    state = {"good": torch.full((2,), float(rank)), "bad": make() if rank == odd else torch.ones(2)}
    raises_everywhere(TensorError, lambda: sync(state), f"sync: bad: {why}")
    if world > 1:
        raises_everywhere(
            TensorError, lambda: sync(state), f"rank {odd}: not ready   <- bad: {why}"
        )
    assert state["good"].eq(rank).all()
    sync(state, odd, ignore=["bad"])
    assert state["good"].eq(odd).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [sync, compare, verify])
def test_states_inside_of_a_dict_are_refused(rank, world, call):
    """Their tensors would be left out in silence: of a checkpoint, or an optimizer's state_dict."""
    model = nn.Linear(2, 2)
    for inner in (model.state_dict(), [torch.ones(1)], model, torch.optim.SGD([torch.ones(1)])):
        with pytest.raises(InputError, match="'model' is a"):
            call({"model": inner, "step": 5})


@pytest.mark.ranks(3)
def test_numbers_in_a_dict_are_sent_too(rank, world):
    state = {"step": 5 + rank, "weight": torch.full((2,), float(rank)), "name": f"of {rank}"}
    sync(state, src=1)
    assert state["weight"].tolist() == [1.0, 1.0]
    assert (state["step"], state["name"]) == (6, "of 1")
    verify(state)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ignore", [None, 5, [0], b"weight", [["weight"]]])
def test_what_no_names_are_to_ignore_raises_on_every_rank(rank, world, ignore):
    for call in (sync, compare, verify):
        with pytest.raises(InputError, match="ignore holds"):
            call(nn.Linear(2, 2), ignore=() if rank else ignore)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("equal", [True, False])
def test_inside_of_a_compiled_function(rank, world, equal):
    """A graph break at one place on every rank, whether the states differ or not."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(0 if equal else rank)
        model.bias.fill_(0)

    @torch.compile(backend="eager")
    def step(x):
        found = len(compare(model))
        sync(model)
        verify(model)
        return model(x).sum() + found

    with ag.deadline(30):
        assert step(torch.ones(1, 2)).item() == (not equal)


@pytest.mark.ranks(2)
def test_shards_of_fsdp1_are_refused(rank, world):
    model = nn.Sequential(
        FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu")), nn.Linear(2, 2)
    )
    for call in (sync, compare, verify):
        with pytest.raises(InputError, match="0 is sharded by FSDP1"):
            call(model)
