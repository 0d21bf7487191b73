"""Attention over histories that samples share: the same outputs and gradients as of every sample's own list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)

from flexshard.embeddings import (
    Deduped,
    DedupedCausal,
    DedupedEmbeddingBagCollection,
    DedupedEmbeddingCollection,
    DedupedJagged,
    DedupedPerSample,
    InverseKeyedJaggedTensor,
    PartialJaggedTensor,
    TargetAttention,
)
from flexshard.errors import DataError
from flexshard.ingestion import BatchPosition, ReaderPhases, SessionBatch

DIM, LONGEST = 8, 6
GROUPS: dict[str, dict[str, Any]] = {"plain": {}, "exact": {"groups": [["h"]]}, "partial": {"partial": [["h"]]}}
LISTS = [list(range(max(0, end - LONGEST), end)) for end in range(14)] + [[], [20], [20, 21], [3, 3, 3], [20]]


def batch(how: str, newest: str = "last", order: list[int] | None = None) -> InverseKeyedJaggedTensor:
    lists = [LISTS[row] for row in order or range(len(LISTS))]
    rows = [{"h": row[:: 1 if newest == "last" else -1], "item": [len(row)]} for row in lists for _ in range(2)]
    return InverseKeyedJaggedTensor.from_rows(rows, keys=["h", "item"], newest=newest, **GROUPS[how])


class Lookup(nn.Module):
    """In double precision from here on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingConfig(name="t", num_embeddings=30, embedding_dim=DIM, feature_names=["h", "item"])
        self.lookup = DedupedEmbeddingCollection(EmbeddingCollection(tables=[config]))

    def forward(self, features: InverseKeyedJaggedTensor) -> dict[str, Any]:
        found = self.lookup(features)
        return {
            name: JaggedTensor(each.values().double(), lengths=each.lengths())
            if isinstance(each, JaggedTensor)
            else each.with_values(each.values.double())
            for name, each in found.items()
        }


def lookup() -> Lookup:
    return Lookup()


def padded(history: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Lists as rows of one width, which FBGEMM has for no double precision; and where they are."""
    inside = torch.arange(LONGEST) < history.lengths()[:, None]
    return torch.zeros(*inside.shape, DIM, dtype=torch.float64).index_put((inside,), history.values()), inside


class Causal(nn.Module):
    """Two layers of self-attention with a causal mask and places counted from the start."""

    def __init__(self, *, is_causal: bool = True, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LONGEST, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = norm or nn.Identity()
        self.is_causal = is_causal
        self.lists: list[int] = []

    def forward(self, history: JaggedTensor) -> Tensor:
        self.lists.append(history.lengths().numel())
        rows, inside = padded(history)
        after = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1) if self.is_causal else None
        nobody = rows.new_zeros(LONGEST, LONGEST, dtype=torch.bool)
        found = self.layers(rows + self.place, mask=nobody if after is None else after, src_key_padding_mask=~inside)
        return self.norm(found[inside])


def gradients(loss: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return list(torch.autograd.grad(loss, parameters))


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(tensor.abs().max() > 0 for tensor in expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("newest", ["last", "first"])
@pytest.mark.parametrize("how", ["plain", "exact", "partial"])
def test_a_causal_module_runs_once_per_start(how: str, newest: str) -> None:
    table = lookup()
    model = DedupedCausal(Causal().double())
    weight = torch.randn(2 * len(LISTS), DIM, dtype=torch.float64)
    each = table(batch("plain", newest))["h"]
    assert isinstance(each, JaggedTensor)
    ends = torch.cumsum(each.lengths(), 0) - 1
    outputs = model.module(each)
    last = torch.where(each.lengths()[:, None] > 0, outputs[ends.clamp(min=0)], 0)
    # The first output of every list too: of what is shared, not only the end has to be right.
    expected = [outputs, last, *gradients((last * weight).sum() + outputs.square().sum(), table, model)]
    model.module.lists.clear()
    found = model(table(batch(how, newest))["h"])
    values = found.to_jagged().values()
    close(
        [values, found.last(), *gradients((found.last() * weight).sum() + values.square().sum(), table, model)],
        expected,
    )
    distinct = len({tuple(row) for row in LISTS})
    # Lists of up to six ids begin alike (the empty one too), seven by themselves after them; then those of 20 and of 3.
    starts = 1 + 7 + 2 if newest == "last" else distinct
    assert model.module.lists[0] == {"plain": 2 * len(LISTS), "exact": distinct, "partial": starts}[how]
    assert len(model.module.lists) == 3  # with the check that it is causal, at calls 1, 2, 4, ...
    for calls in (6, 7, 10, 11):
        model(table(batch(how, newest))["h"])
        assert len(model.module.lists) == calls


def test_modules_that_samples_cannot_share() -> None:
    history = lookup()(batch("partial"))["h"]
    with pytest.raises(DataError, match="the module is not causal: what it makes of a place changes with"):
        DedupedCausal(Causal(is_causal=False).double())(history)
    with pytest.raises(DataError, match=r"TransformerEncoderLayer 'layers.layers.0' drops 10% at random|drops 10%"):
        DedupedCausal(Causal(dropout=0.1))
    with pytest.raises(DataError, match="Dropout drops 50% at random: samples that share a row would lose the same"):
        Deduped(nn.Dropout(0.5))
    with pytest.raises(DataError, match="BatchNorm1d 'norm' normalises over rows: a row that many samples share would"):
        Deduped(Causal(norm=nn.BatchNorm1d(DIM)))

    class Hidden(nn.Module):
        def forward(self, rows: JaggedTensor) -> Tensor:
            return functional.dropout(rows.lengths().double(), 0.5, self.training)

    module = Deduped(Hidden())
    with pytest.raises(DataError, match="the module drew random numbers, as dropout does"):
        module(history)
    module.eval()
    module.module.train()
    with pytest.raises(DataError, match="the module drew random numbers"):
        module(history)
    module.eval()(history)
    module.train()(lookup()(batch("plain"))["h"])  # every sample has a row of its own here

    class Wrong(nn.Module):
        def forward(self, rows: JaggedTensor) -> Tensor:
            return rows.lengths()

    with pytest.raises(DataError, match=r"the causal module returned \(\d+,\) for \d+ values of its sequences"):
        DedupedCausal(Wrong())(history)


class OfRows(nn.Module):
    """What is given of the rows' lists, whose means have a few numbers each."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, rows: JaggedTensor) -> Any:
        return self.change(torch.stack([row.sum(0) for row in rows.to_dense()]))


def test_rows_that_depend_on_each_other_are_noticed() -> None:
    history = lookup()(batch("exact"))["h"]
    own = torch.Generator()

    @dataclass
    class Answer:
        rows: Tensor

    ways: list[tuple[Callable[[Tensor], Any], str]] = [
        (lambda rows: functional.batch_norm(rows, None, None, training=True), "does not treat rows one by one"),
        (lambda rows: rows * torch.rand(rows.shape, generator=own), "does not treat rows one by one"),
        (lambda rows: rows - rows.mean(0), "does not treat rows one by one"),
        (Answer, "the module returned a Answer, whose rows are not seen"),
    ]
    for change, message in ways:
        with pytest.raises(DataError, match=message):
            Deduped(OfRows(change))(history)
    module = Deduped(OfRows(lambda rows: {"rows": (functional.layer_norm(rows, rows.shape[1:]), 3, None)}))
    assert module(history)["rows"][0].shape == (2 * len(LISTS), DIM)


class Blocks(nn.Module):
    """Attention both ways within blocks of some places; with a gate, once it has opened."""

    def __init__(self, size: int, dim: int = DIM, gate: float = 1.0) -> None:
        super().__init__()
        self.attention, self.size = nn.MultiheadAttention(dim, 2, batch_first=True), size
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, rows: JaggedTensor) -> JaggedTensor:
        parts = [part[None] for row in rows.to_dense() for part in row.split(self.size) if part.shape[0]]
        found = torch.cat([self.attention(part, part, part)[0][0] for part in parts])
        return JaggedTensor(rows.values() + self.gate * found, lengths=rows.lengths())


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_modules_that_are_nearly_causal_are_refused(size: float) -> None:
    lists = [list(range(length)) for length in (8, 16, 24, 32, 64)]
    values = size * torch.randn(sum(map(len, lists)), DIM)
    history = JaggedTensor(values, lengths=torch.tensor([len(each) for each in lists]))
    for block in (8, 64):
        with pytest.raises(DataError, match="not causal"):
            DedupedCausal(Blocks(block))(history)
    opening = DedupedCausal(Blocks(64, gate=0.0))
    for _ in range(3):
        opening(history)
    nn.init.ones_(opening.module.gate)
    with pytest.raises(DataError, match="not causal"):
        [opening(history) for _ in range(4)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_causal_modules_are_taken_in_any_precision(kind: Any) -> None:
    lengths = torch.tensor([3, 0, 17, 40])

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, rows: JaggedTensor) -> Tensor:
            found = []
            for row in rows.to_dense():
                if row.shape[0]:
                    mask = torch.ones(row.shape[0], row.shape[0], dtype=torch.bool).triu(1)
                    found.append(self.layers(row[None], mask=mask)[0])
            return torch.cat(found)

    for seed in range(5):
        torch.manual_seed(seed)
        values, module = torch.randn(int(lengths.sum()), 64), DedupedCausal(Masked())
        if isinstance(kind, torch.dtype):
            values, module = values.to(kind), module.to(kind)
        with torch.autocast("cpu", enabled=kind == "autocast"):
            for _ in range(4):
                module(JaggedTensor(values, lengths=lengths))


def test_why_batch_normalisation_is_refused() -> None:
    """Over distinct rows it has another mean than over samples."""
    rows, inverse = torch.tensor([[0.0], [3.0]]), torch.tensor([0, 0, 0, 1])
    norm = nn.BatchNorm1d(1)
    assert not torch.allclose(norm(rows)[inverse], norm(rows[inverse]))


def test_the_check_waits_for_a_list_that_tells() -> None:
    module = DedupedCausal(Causal(is_causal=False).double())
    table = lookup()
    short = [{"h": [1], "item": [1]}, {"h": [2], "item": [1]}]
    module(table(InverseKeyedJaggedTensor.from_rows(short, partial=[["h"]]))["h"])
    with pytest.raises(DataError, match="not causal"):
        module(table(batch("partial"))["h"])


@pytest.mark.parametrize("order", [None, [14, 3, 9, 0, 18, 2, 3, 11, 16, 1]])
@pytest.mark.parametrize("how", ["plain", "exact", "partial"])
def test_target_attention_is_torchs(how: str, order: list[int] | None) -> None:
    table = lookup()
    ours, theirs = TargetAttention(DIM, 2).double(), nn.MultiheadAttention(DIM, 2, batch_first=True).double()
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    plain = table(batch("plain", order=order))
    history, target = plain["h"], plain["item"].values()
    assert isinstance(history, JaggedTensor)
    rows, inside = padded(history)
    full = history.lengths() > 0
    # Of empty histories theirs is nan: they see zeros instead of nothing, and are left out here.
    each = theirs(target[:, None], rows, rows, key_padding_mask=~inside & full[:, None])[0][:, 0]
    weight = torch.randn(target.shape, dtype=torch.float64)
    expected = [each[full], *gradients((each * weight)[full].sum(), table, theirs)]
    features = table(batch(how, order=order))
    found = ours(features["item"].values(), features["h"])
    close([found[full], *gradients((found * weight)[full].sum(), table, ours)], expected)
    torch.testing.assert_close(found[~full], ours.out_proj.bias.expand(int((~full).sum()), DIM))


def test_target_attention_drops_for_each_sample() -> None:
    torch.manual_seed(1)
    attention = TargetAttention(DIM, 2, dropout=0.5)
    history = PartialJaggedTensor(torch.randn(6, DIM), torch.zeros(2, dtype=torch.int64), torch.tensor([6, 6]))
    one, other = attention(torch.ones(2, DIM), history)
    assert not torch.equal(one, other)
    one, other = attention.eval()(torch.ones(2, DIM), history)
    assert torch.equal(one, other)
    nothing = attention(
        torch.ones(2, DIM), PartialJaggedTensor(torch.zeros(0, DIM), *torch.zeros(2, 2, dtype=torch.int64))
    )
    assert torch.equal(nothing, attention.out_proj.bias.expand(2, DIM))


class ActivationUnit(nn.Module):
    """DIN's: a weight for each place from the place, the target, and what they have to do with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4 * DIM, 5), nn.PReLU(), nn.Linear(5, 1))

    def forward(self, history: JaggedTensor, target: Tensor) -> Tensor:
        rows = torch.repeat_interleave(torch.arange(target.shape[0]), history.lengths())
        values, asked = history.values(), target[rows]
        weight = self.layers(torch.cat([values, asked, values - asked, values * asked], 1))
        return torch.zeros_like(target).index_add(0, rows, values * weight)


@pytest.mark.parametrize("how", ["exact", "partial"])
def test_a_target_of_any_module_is_each_samples_own(how: str) -> None:
    table, unit = lookup(), DedupedPerSample(ActivationUnit().double())
    results = []
    for features in (table(batch("plain")), table(batch(how))):
        found = unit(features["h"], target=features["item"].values())
        results.append([found, *gradients(found.square().sum(), table, unit)])
    close(results[1], results[0])
    with pytest.raises(DataError, match="put its feature in the group of the others, or use DedupedPerSample"):
        Deduped(ActivationUnit().double())(features["h"], features["item"])


def test_pooling_takes_partial_histories_as_exact_ones() -> None:
    class Mean(nn.Module):
        def forward(self, history: JaggedTensor) -> Tensor:
            return torch.stack([rows.sum(0) for rows in history.to_dense()])

    table = lookup()
    expected, *others = (Deduped(Mean())(table(batch(how))["h"]) for how in GROUPS)
    for found in others:
        torch.testing.assert_close(found, expected)


def test_weights_and_order_are_those_of_stock_collections() -> None:
    configs = [EmbeddingConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=[name]) for name in "ab"]
    stock = nn.ModuleDict({"lookup": EmbeddingCollection(tables=configs)})
    ours = nn.ModuleDict({"lookup": DedupedEmbeddingCollection(EmbeddingCollection(tables=configs))})
    bags = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=f) for n, f in BAGS.items()]
    for theirs, mine in (
        (stock, ours),
        (
            nn.ModuleDict({"lookup": EmbeddingBagCollection(tables=bags)}),
            nn.ModuleDict({"lookup": DedupedEmbeddingBagCollection(bags, [["c"]], partial=[["a", "d"]])}),
        ),
    ):
        state = theirs.state_dict()
        assert list(state) == list(mine.state_dict())
        mine.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items())
        assert sorted(state) == sorted(theirs.state_dict())  # nobody's dictionary has changed
        theirs.load_state_dict(mine.state_dict())
        old = {f"lookup.{name}": value for name, value in mine["lookup"].named_parameters()}  # as 0.1 saved them
        mine.load_state_dict(old)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            mine.load_state_dict(state | {"lookup.other": torch.zeros(1)})
        others = {name: value for name, value in state.items() if ".a." not in name and ".t." not in name}
        others |= {name: torch.zeros(1) for name in ("lookup.other", "elsewhere", "lookup.collections.x")}
        assert len(others) == len(state) + 2
        told = [module.load_state_dict(others, strict=False) for module in (theirs, mine)]
        assert sorted(told[0].missing_keys) == sorted(told[1].missing_keys)
        assert sorted(told[0].unexpected_keys) == sorted(told[1].unexpected_keys)
        for name in state:  # what tools look names up by
            assert torch.equal(
                mine.get_parameter(name) if hasattr(mine["lookup"], "collection") else state[name], state[name]
            )
    rows = [{"c": [1], "a": [1, 2], "d": [3, 4], "b": [n]} for n in range(3)]
    how: dict[str, Any] = {"keys": ["b", "d", "c", "a"]}
    expected = theirs["lookup"](InverseKeyedJaggedTensor.from_rows(rows, **how).to_keyed_jagged())
    for batch in (
        InverseKeyedJaggedTensor.from_rows(rows, [["c"]], partial=[["a", "d"]], **how),
        InverseKeyedJaggedTensor.from_rows(rows, **how),  # a plain one
    ):
        found = mine["lookup"](batch)
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values())


BAGS = {"u": ["b"], "t": ["a", "d"], "v": ["c"]}


@pytest.mark.parametrize("kind", [torch.device("cpu"), torch.device("meta"), None])
def test_weights_to_begin_with_are_stock_collections(kind: torch.device | None) -> None:
    """Tables of three groups in turns, one of which is called as its feature is."""

    def tables() -> list[EmbeddingBagConfig]:
        features = [["a"], ["b"], ["c", "d"], []]
        return [
            EmbeddingBagConfig(name=f"t{number}", num_embeddings=20, embedding_dim=4, feature_names=names)
            for number, names in enumerate(features)
        ]

    torch.manual_seed(5)
    stock = EmbeddingBagCollection(tables=tables(), device=kind)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    ours = DedupedEmbeddingBagCollection(tables(), [["b"], ["d", "c"]], device=kind)
    assert torch.equal(after, torch.get_rng_state())
    expected, found = stock.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(weight.device == found[name].device for name, weight in expected.items())
    assert {each.device for each in ours.collections.values()} == {stock.device}
    if kind is None or kind.type == "cpu":
        assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_batches_that_do_not_belong() -> None:
    bags = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=f) for n, f in BAGS.items()]
    collection = DedupedEmbeddingBagCollection(bags, [["c"]], partial=[["a", "d"]])
    kjt = KeyedJaggedTensor(keys=["h"], values=torch.tensor([1]), lengths=torch.tensor([1]))
    for module in (collection, lookup().lookup):
        with pytest.raises(DataError, match="found a KeyedJaggedTensor for a deduplicated batch; make one with"):
            module(kjt)
    rows = [{"c": [1], "a": [1, 2], "d": [3, 4], "b": [1]}]
    with pytest.raises(DataError, match="the batch deduplicates a, d exactly, the collection partially"):
        collection(InverseKeyedJaggedTensor.from_rows(rows, [["c"], ["a", "d"]]))
    with pytest.raises(DataError, match="no feature 'a' in the batch; there are b, c, d"):
        collection(InverseKeyedJaggedTensor.from_rows([{"b": [1], "c": [1], "d": [1]}]))
    for wrong, message in (
        ("c", "a group is a list of features' names, found 'c'; write groups as"),
        (["c", "zzz"], "no table has feature 'zzz' of group 0; leave it out"),
    ):
        with pytest.raises(DataError, match=message):
            DedupedEmbeddingBagCollection(bags, [wrong])
    with pytest.raises(DataError, match="lists that share ids have no weights"):
        DedupedEmbeddingBagCollection(bags, partial=[["a", "d"]], is_weighted=True)
    whole = SessionBatch(InverseKeyedJaggedTensor.from_rows(rows), {}, ReaderPhases(), BatchPosition())
    loader: DataLoader[Any] = DataLoader([whole, whole])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batches are whole; make the DataLoader by reader"):
        next(iter(loader))
    none = DedupedEmbeddingBagCollection(bags[:1], partial=[["b"]])
    assert not none(InverseKeyedJaggedTensor.from_rows([{"b": []}, {"b": []}], partial=[["b"]])).values().any()
    for option in ("add_bias_kv", "add_zero_attn", "kdim", "vdim", "batch_first"):
        with pytest.raises(DataError, match=f"TargetAttention has no '{option}'"):
            TargetAttention(4, 2, **{option: True})
    lists = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([1, 2]))
    for rows_of, history, message in (
        (1, lists, r"target has shape \(1, 4\) for 2 samples' histories"),
        (4, lists, r"target has shape \(4, 4\) for 2"),
        (2, torch.ones(2, 3, 4), "found Tensor"),
    ):
        with pytest.raises(DataError, match=message):
            TargetAttention(4, 2)(torch.ones(rows_of, 4), history)
    jagged = DedupedJagged(torch.ones(1, 2), torch.tensor([1]), torch.tensor([0, 0]))
    assert Deduped(nn.Identity())(jagged) is not None


@pytest.mark.parametrize("feature", ["exact", "partial"])
def test_a_batch_looked_at_for_inference_may_be_trained_on(feature: str) -> None:
    rows = [
        {"exact": [1, 2], "partial": [1]},
        {"exact": [6], "partial": [1, 2]},
        {"exact": [1, 2], "partial": [1, 2, 3]},
    ]
    batch = InverseKeyedJaggedTensor.from_rows(rows, groups=[["exact"]], partial=[["partial"]])
    config = EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["exact", "partial"])
    collection = DedupedEmbeddingCollection(EmbeddingCollection(tables=[config]))
    attention = TargetAttention(4, 1)

    def used() -> torch.Tensor:
        found = collection(batch)[feature]
        return attention(torch.ones(3, 4), found).sum() + found.expand().values().sum()

    with torch.inference_mode():
        before = float(used())
    loss = used()
    loss.backward()
    assert float(loss.detach()) == before
    assert collection.collection.embeddings["t"].weight.grad is not None
