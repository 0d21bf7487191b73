"""What a tensor train costs: counts by hand and by drawing batches, operations as torch counts them, rates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Table
from flexshard.costmodels import ShapeRates, TTRates, TTReads, TTWork, fit_rates, tensor_train_cost
from flexshard.errors import DataError
from flexshard.tables.tensor_train_shape import TTShape
from tests.slow import crossed

SHAPE = TTShape(24, 8, (2, 3, 4), (2, 2, 2), (3, 5))


def zipf_table(rows: int, length: float, dim: int = 8) -> Table:
    counts = np.maximum(1e6 / np.arange(1, rows + 1) ** 1.1, 0).astype(np.int64)
    return Table("t", rows, dim, AccessProfile.from_counts(counts, num_samples=int(counts.sum() / length)))


def test_prefixes_of_a_batch_by_hand() -> None:
    ids = [0, 1, 3, 4, 23, 23, 0]  # prefixes of two digits 0, 0, 0, 1, 5; of one 0, 0, 0, 0, 1
    assert TTReads.of(ids, 2, SHAPE) == TTReads(7.0, 2, (2.0, 3.0, 5.0))


@pytest.mark.parametrize(("cores", "hashed"), crossed([2, 3, 4], [False, True]))
def test_expected_prefixes_are_those_of_batches_that_are_drawn(cores: int, hashed: bool) -> None:
    table = zipf_table(4000, length=4.0)
    shape = TTShape.choose(4000, 8, 4, cores=cores)
    expected = TTReads.expected(table, 256, shape, hashed=hashed)
    generator = np.random.default_rng(0)
    p = np.repeat(table.profile.counts, table.profile.rows) / table.profile.num_samples
    drawn = []
    for _ in range(200):
        place = generator.permutation(4000) if hashed else np.arange(4000)
        ids = np.concatenate([place[generator.random(4000) < p] for _ in range(256)])
        drawn.append(TTReads.of(ids, 256, shape).prefixes)
    # A row whose p is above 1 is drawn at most once here; everything else is the same law.
    np.testing.assert_allclose(expected.prefixes, np.mean(drawn, axis=0), rtol=0.02)
    assert expected.bags == 256
    assert expected.ids == pytest.approx(256 * 4.0, rel=1e-3)


def test_prefixes_of_very_large_tables_take_no_memory() -> None:
    counts, rows = [100, 3, 1], [10**6 + 7, 10**9 + 3, 10**12]
    profile = AccessProfile.from_histogram(counts, rows, num_samples=10**12, num_rows=2 * 10**12)
    for cores in (2, 3, 4):
        shape = TTShape.choose(2 * 10**12, 8, 4, cores=cores)
        found = TTReads.expected(Table("t", 2 * 10**12, 8, profile), 4096, shape)
        assert all(a <= b for a, b in zip(found.prefixes, found.prefixes[1:], strict=False))
        assert 0 < found.prefixes[-1] <= found.ids


def test_work_by_hand() -> None:
    work = TTWork.of(SHAPE, TTReads(7.0, 2.0, (2.0, 3.0, 5.0)))
    assert work.pooled == 9 * 8
    assert (work.distinct, work.rows) == (5, 40)
    assert work.prefix_flops == 2 * 3 * 4 * 3 * 5  # three prefixes, (2 x 3) @ (3 x 2·5)
    assert work.prefix_numbers == 3 * 4 * 5
    assert work.suffix_flops == 2 * 5 * 8 * 5
    assert work.flops == 360 + 400
    assert work.nbytes == 4 * (60 + 40 + 72)
    assert work.parameters == 2 * 2 * 3 + 3 * 3 * 2 * 5 + 4 * 5 * 2
    two = TTWork.of(TTShape(24, 8, (4, 6), (2, 4), (3,)), TTReads(7.0, 2.0, (2.0, 5.0)))
    assert (two.prefix_flops, two.prefix_products, two.suffix_flops) == (0, 0, 2 * 5 * 8 * 3)


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_operations_are_those_that_torch_counts(cores: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from flexshard.embeddings import TTEmbedding

    table = TTEmbedding(5000, 16, tt_ranks=6, cores=cores, backend="torch")
    ids = torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(0))
    work = TTWork.of(table.shape, TTReads.of(ids.numpy(), 300, table.shape))
    with FlopCounterMode(display=False) as forward:
        rows = table(ids)
    assert forward.get_total_flops() == work.flops
    with FlopCounterMode(display=False) as backward:
        rows.sum().backward()
    assert backward.get_total_flops() == 2 * work.flops


def test_memory_and_communication_by_hand(paper_cluster: Cluster) -> None:
    table = Table("t", 24, 8, AccessProfile.from_counts([5, 1], num_samples=10, num_rows=24), optimizer="adagrad")
    cost = tensor_train_cost(table, paper_cluster, SHAPE, TTReads(7.0, 2.0, (2.0, 3.0, 5.0)))
    parameters = 12 + 90 + 40
    products = 3 * 4 * 5
    kept = 4 * products * 9 / 8  # memory that the table keeps, an eighth more than a batch needs
    assert cost.static_memory_bytes == 4 * parameters * 4 + kept  # weights, gradient, bucket, state
    # Rows with gradients, gradients of products, and what the lookup needs per id.
    assert cost.dynamic_memory_bytes == 2 * 4 * 5 * 8 + 4 * products + 45 * 7
    (reduced,) = cost.collectives
    assert (reduced.name, reduced.nbytes) == ("all_reduce@1", 4 * parameters)


def test_rates_are_found_again_and_kept(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rates = np.array([1e-3, 2e-6, 0.0, 5e-9])
    work = generator.random((20, 4)) * [1, 1e4, 1e4, 1e6]
    np.testing.assert_allclose(fit_rates(work, work @ rates), rates, rtol=1e-6, atol=1e-12)
    with pytest.raises(DataError, match="times above 0"):
        fit_rates(work, np.zeros(20))
    own = ShapeRates((2, 3, 4), (2, 2, 2), (3, 5), tuple(np.arange(1.0, 13.0) * 1e-9))
    found = TTRates("a machine", tuple(np.arange(12.0) * 1e-9), (1e-4, 1e-7, 1e-9), (own,))
    found.save(tmp_path / "rates.yaml")
    assert TTRates.load(tmp_path / "rates.yaml") == found
    reads = TTReads(7.0, 2.0, (2.0, 3.0, 5.0))
    work_of = TTWork.of(SHAPE, reads).array
    assert found.step_seconds(SHAPE, reads) == pytest.approx(work_of @ own.step)
    larger = TTShape(60, 8, (3, 4, 5), (2, 2, 2), (3, 5))  # the same ranks, but another table
    assert found.step_seconds(larger, reads) == pytest.approx(TTWork.of(larger, reads).array @ found.step)
    other = TTShape(24, 8, (2, 3, 4), (2, 2, 2), (2, 2))
    assert found.step_seconds(other, reads) == pytest.approx(TTWork.of(other, reads).array @ found.step)
    assert found.dense_seconds(100, 8) == pytest.approx(1e-4 + 1e-5 + 8e-7)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("version: 1", "version: 7", "version 7 of flexshard.rates is unknown"),
        ("numbers: 1.0e-09", "numbers: -1.0", r"dense.numbers: Input should be greater than or equal to 0"),
        ("numbers: 1.0e-09", "number: 1.0e-09", "rates are of calls, ids, numbers"),
        ("machine: here", "machine: 3", r"machine: expected text, found 3"),
    ],
)
def test_a_file_of_rates_that_cannot_be_used(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "rates.yaml"
    TTRates("here", (0.0,) * 12, (1e-4, 1e-7, 1e-9)).save(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(DataError, match=message) as raised:
        TTRates.load(path)
    assert str(path) in str(raised.value)
