"""The master problem of whole models against every plan there is, and against the mixed-integer program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flexshard.errors import BudgetError
from flexshard.planner.whole_model import master
from flexshard.planner.whole_model.annealing import Annealing, flat, held, place, rating
from flexshard.planner.whole_model.formulation import Bins, ProgramAnswer
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment, assign
from flexshard.planner.whole_model.menus import Menus, Option, Spread, undominated
from flexshard.planner.whole_model.program import solve_menus_program
from flexshard.planner.whole_model.watching import watching
from tests.slow import first

FloatArray = npt.NDArray[np.float64]
EXACT = 1e-5


def random_menus(seed: int, tables: int, hosts: int, per_host: int, tight: float, groups: bool = False) -> Menus:
    """Menus whose options cost and weigh about what sharding types do; ``tight`` is the memory there is, relative to
    what the lightest options need."""
    rng = np.random.default_rng(seed)
    ranks = hosts * per_host
    kinds = (
        ("row_wise", Spread.EVERY_RANK, ranks, 1.6 / ranks, 1 / ranks),
        ("table_row_wise", Spread.HOST_BLOCKS, per_host, 1.3 / per_host, 1 / per_host),
        ("table_column_wise", Spread.ONE_HOST, 2, 0.55, 0.5),
        ("table_wise", Spread.ANY_RANK, 1, 1.0, 1.0),
        ("column_wise", Spread.ANY_RANK, 2, 0.55, 0.5),
    )
    menus = []
    for table in range(tables):
        cost, weight = rng.uniform(1, 10), float(rng.integers(100, 2_000))
        options = []
        for kernel, speed, share in (("fused", 1.0, 1.0), ("uvm", rng.uniform(2, 20), 0.2)):
            for name, spread, parts, each, whole in kinds:
                perf = np.full(parts, cost * speed * each) * (1 if spread is Spread.ANY_RANK else rng.uniform(0.9, 1.1))
                device = np.floor(np.full(parts, weight * share * whole))
                host = np.floor(np.full(parts, weight * whole * (kernel == "uvm")))
                options.append(Option(f"{name}/{kernel}", spread, perf, np.array([device, host])))
        grouped = groups and table < 2
        chosen = [o for o in options if not grouped or o.spread in (Spread.HOST_BLOCKS, Spread.ONE_HOST)]
        picked = rng.permutation(len(chosen))[: 4 if grouped else 5]
        menus.append(tuple(chosen[i] for i in sorted(picked)))
    least = sum(min(o.memory[0].sum() for o in menu) for menu in menus)
    capacity = np.array([np.full(ranks, least * tight / ranks), np.full(ranks, 4_000.0)]) * rng.uniform(0.9, 1.1, ranks)
    for number, menu in enumerate(menus):
        menus[number] = tuple(Option(o.name, o.spread, o.perf, o.memory, i) for i, o in enumerate(menu))
    names = tuple(f"t{table}" for table in range(tables))
    return Menus(names, tuple(menus), np.floor(capacity), ("HBM", "host"), per_host, ((0, 1),) if groups else ())


def with_phases(menus: Menus, seed: int, loads: int = 3) -> Menus:
    """The same with several kinds of load, some of them shared by the ranks of a host, and a charge for each sharding
    type.
    """
    rng = np.random.default_rng(seed)
    names = ["row_wise", "table_row_wise", "table_column_wise", "table_wise", "column_wise"]
    split = [
        tuple(
            Option(
                o.name,
                o.spread,
                o.perf * rng.dirichlet(np.ones(loads))[:, None],
                o.memory,
                o.source,
                names.index(o.name.partition("/")[0]) - 1,
            )
            for o in menu
        )
        for menu in menus.options
    ]
    charges = tuple(rng.uniform(0, 3, len(names) - 1))
    sharing = tuple(int(rng.choice([1, menus.ranks_per_host])) for _ in range(loads))
    names = list(map(str, range(loads)))
    return replace(menus, options=tuple(split), loads=tuple(names), charges=charges, sharing=sharing)


def uneven(menus: Menus, seed: int) -> Menus:
    """The same where blocks of rows are read more or less than one another, with the averages that bounds watch."""
    rng = np.random.default_rng(seed)

    def skewed(option: Option) -> Option:
        if option.spread not in (Spread.EVERY_RANK, Spread.HOST_BLOCKS):
            return option
        shares = rng.dirichlet(np.full(option.shards, 0.7)) * option.shards
        return replace(option, perf=option.perf * shares)

    return watching(menus.with_options([tuple(map(skewed, menu)) for menu in menus.options]))


def carried(menus: Menus, option: Option, where: Sequence[int]) -> FloatArray:
    """Loads of all ranks, of those that are shared the mean; shape (loads, ranks)."""
    load = np.array([np.bincount(where, p, menus.ranks) for p in option.perf])
    for row, together in zip(load, menus.sharing, strict=True):
        row[:] = row.reshape(-1, together).mean(axis=1).repeat(together)
    return load


def placements(option: Option, menus: Menus) -> Iterator[tuple[int, ...]]:
    """Every way of laying an option's shards on ranks."""
    ranks, per_host = menus.ranks, menus.ranks_per_host
    hosts = [tuple(range(h * per_host, (h + 1) * per_host)) for h in range(menus.hosts)]
    if option.spread is Spread.EVERY_RANK:
        yield tuple(range(ranks))
    elif option.spread is Spread.HOST_BLOCKS:
        blocks = option.shards // per_host
        for chosen in itertools.product(range(len(hosts)), repeat=blocks):
            counts = [chosen.count(h) for h in range(len(hosts))]
            if max(counts) <= min(counts) + 1:  # no host has two before every host has one
                yield tuple(rank for h in chosen for rank in hosts[h])
    elif option.spread is Spread.ONE_HOST:
        for host in hosts:
            yield from itertools.product(host, repeat=option.shards)
    else:
        yield from itertools.product(range(ranks), repeat=option.shards)


def exhaustive(menus: Menus) -> float:
    """The best rating of all plans; infinite if none fits."""
    best = np.inf
    ranks = menus.ranks
    ways: list[list[tuple[FloatArray, FloatArray, int, int]]] = []
    for menu in menus.options:
        table = {}
        for option in menu:
            for where in placements(option, menus):
                load = carried(menus, option, where)
                used = np.array([np.bincount(where, m, ranks) for m in option.memory])
                host = where[0] // menus.ranks_per_host
                table[load.tobytes() + used.tobytes(), host, option.charge] = (load, used, host, option.charge)
        ways.append(list(table.values()))

    def descend(table: int, load: FloatArray, used: FloatArray, hosts: dict[int, int], paid: frozenset[int]) -> None:
        nonlocal best
        cost = float(load.max(axis=1).sum()) + sum(menus.charges[charge] for charge in paid)
        if cost >= best or (used > menus.capacity).any():
            return
        if table == len(ways):
            best = cost
            return
        group = next((g for g in menus.together if table in g), None)
        for more, bytes_, host, charge in ways[table]:
            if group is not None and hosts.get(group[0], host) != host:
                continue
            chosen = hosts if group is None else hosts | {group[0]: host}
            descend(table + 1, load + more, used + bytes_, chosen, paid | ({charge} - {-1}))

    descend(0, np.zeros((len(menus.loads), ranks)), np.zeros(menus.capacity.shape), {}, frozenset())
    return best


def check(menus: Menus, found: Assignment) -> None:
    """Whether an assignment is one, and rated as it says."""
    load, used, paid = np.zeros((len(menus.loads), menus.ranks)), np.zeros(menus.capacity.shape), set()
    for table, (menu, source, where) in enumerate(zip(menus.options, found.choice, found.ranks, strict=True)):
        option = next(o for o in menu if o.source == source)
        assert len(where) == option.shards
        assert where in set(placements(option, menus)), (table, option.name, where)
        load += carried(menus, option, where)
        paid |= {option.charge} - {-1}
        used += np.array([np.bincount(where, m, menus.ranks) for m in option.memory])
    assert (used <= menus.capacity).all()
    cost = load.max(axis=1).sum() + sum(menus.charges[charge] for charge in paid)
    assert found.rating == pytest.approx(cost, rel=1e-12)
    for group in menus.together:
        assert len({found.ranks[t][0] // menus.ranks_per_host for t in group}) == 1


@pytest.mark.parametrize("costs", ["one kind", "phases", "uneven"])
@pytest.mark.parametrize("seed", first(14, range(36)))
def test_plans_of_small_models_are_the_best_of_all(seed: int, costs: str) -> None:
    tight = (1.05, 1.4, 3.0)[seed % 3]
    menus = random_menus(seed, 3, *((2, 2), (1, 3), (3, 1))[seed // 3 % 3], tight, groups=seed % 4 == 3)
    if costs != "one kind":
        menus = with_phases(menus, seed)
    if costs == "uneven":
        menus = uneven(menus, seed)
    best = exhaustive(menus)
    if np.isinf(best):
        with pytest.raises(BudgetError):
            assign(menus, seconds=120, gap=EXACT)
        return
    found = assign(menus, seconds=120, gap=EXACT)
    check(menus, found)
    assert found.rating == pytest.approx(best, rel=2 * EXACT)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.finished


@pytest.mark.parametrize(
    "seed", first(5, [100, 102, 103, 105, 109, *(seed for seed in range(101, 160) if seed not in (102, 103, 105, 109))])
)
def test_plans_of_small_models_are_the_mixed_integer_optimum(seed: int) -> None:
    tight = (1.1, 1.5, 4.0)[seed % 3]
    menus = random_menus(seed, 5 + seed % 3, 2, 2, tight, groups=seed % 5 == 0)
    if seed % 2:
        menus = with_phases(menus, seed)
    exact = solve_menus_program(undominated(menus), "ranks", gap=1e-9, seconds=60)
    assert exact.proven
    if exact.choice is None:
        with pytest.raises(BudgetError):
            assign(menus, seconds=120, gap=EXACT)
        return
    found = assign(menus, seconds=120, gap=EXACT)
    check(menus, found)
    assert found.rating == pytest.approx(exact.bound, rel=2e-5)
    assert found.lower_bound <= exact.bound * (1 + 2e-6)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_bound_is_below_the_best_plan(seed: int, skewed: bool) -> None:
    menus = random_menus(seed, 3, 2, 2, (1.1, 1.6)[seed % 2], groups=seed % 3 == 0)
    menus = with_phases(menus, seed) if seed % 4 > 1 else menus
    menus = undominated(uneven(menus, seed) if skewed else menus)
    best = exhaustive(menus)
    assert lagrangian_bound(menus).bound <= best * (1 + 1e-9)
    bounds = []
    kinds: tuple[Bins, ...] = ("cluster", "hosts", "ranks")
    for bins in kinds:
        bounds.append(solve_menus_program(menus, bins, gap=1e-9, seconds=60).bound)
        assert bounds[-1] <= best * (1 + 2e-6)
    assert bounds == sorted(bounds) or np.diff(bounds).min() > -1e-5 * best  # each looks closer than the one before
    if np.isfinite(best):
        assert bounds[-1] == pytest.approx(best, rel=2e-6)


@pytest.mark.parametrize("seed", range(20))
def test_averages_that_are_watched_bound_what_a_plan_takes(seed: int) -> None:
    menus = uneven(with_phases(random_menus(seed, 4, *((2, 2), (1, 4), (4, 1))[seed % 3], 9.0), seed), seed)
    assert menus.watched is not None
    assert menus.averages is not None
    assert menus.alone is not None
    assert menus.watched.weights.sum(axis=1) == pytest.approx(1.0)
    of_loads = menus.averages.weights.sum(axis=1) + menus.alone[: len(menus.loads)].sum(axis=1)
    assert of_loads == pytest.approx(1.0)
    assert (menus.alone[len(menus.loads) :].sum(axis=1) <= 1 + 1e-9).all()
    rng = np.random.default_rng(seed)
    for _ in range(30):
        loads, bound = np.zeros((len(menus.loads), menus.ranks)), 0.0
        averages, paid = np.zeros(len(menus.watched.loads)), set[int]()
        for table, menu in enumerate(menus.options):
            option = menu[rng.integers(len(menu))]
            ways = list(placements(option, menus))
            loads += carried(menus, option, ways[rng.integers(len(ways))])
            bound += menus.added_up(table, option) / menus.ranks
            averages += menus.watched.of(option, menus.ranks_per_host)
            paid |= {option.charge} - {-1}
        most = loads.max(axis=1)
        assert bound <= (most.sum() + sum(menus.charges[one] for one in paid)) * (1 + 1e-9)
        assert (averages <= most[menus.watched.loads] * (1 + 1e-9)).all()


def test_busy_ranks_that_nothing_makes_up_for_are_bounded() -> None:
    # Ids of two row-wise tables, whose first ranks have most of them: no plan is better than what these have.
    perf = np.array([[0.0] * 4, [8.0, 1.0, 1.0, 2.0]])
    options = [(Option("row_wise", Spread.EVERY_RANK, perf, np.ones((1, 4))),)] * 2
    menus = Menus(("a", "b"), tuple(options), np.full((1, 4), 9.0), ("HBM",), 2, loads=("alike", "ids"))
    assert lagrangian_bound(menus).bound == pytest.approx(8.0)  # what one of them needs alone
    assert lagrangian_bound(watching(menus)).bound == pytest.approx(16.0)


def test_plans_far_above_the_bound_are_found() -> None:
    """Slow kernels that bounds count for nothing, since some average leaves their ranks out."""
    memory = np.full((1, 4), 0.0)
    menu = [(Option("row_wise", Spread.EVERY_RANK, np.array([[0.0] * 4, [8.0, 1.0, 1.0, 1.0]]), memory),)]
    for _ in range(6):
        fast = Option("fast", Spread.ANY_RANK, np.array([[0.0], [0.001]]), np.array([[60.0]]), 0)
        slow = Option("slow", Spread.ANY_RANK, np.array([[0.0], [3_000.0]]), np.array([[0.0]]), 1)
        menu.append((fast, slow))
    tiny = Option("tiny", Spread.ANY_RANK, np.array([[0.0], [1e-9]]), np.array([[0.0]]))
    menu += [(tiny,)] * 1_400
    names = tuple(f"t{index}" for index in range(len(menu)))
    menus = Menus(names, tuple(menu), np.full((1, 4), 100.0), ("HBM",), 2, loads=("alike", "ids"))
    plain, watched = (assign(one, seconds=1.0) for one in (menus, watching(menus)))
    assert watched.rating == pytest.approx(plain.rating, rel=0.01)


def test_options_that_another_beats_are_left_out() -> None:
    def option(name: str, spread: Spread, perf: list[float], memory: list[float]) -> Option:
        return Option(name, spread, np.array(perf), np.array([memory]))

    menus = Menus(
        ("t",),
        (
            (
                option("table_wise", Spread.ANY_RANK, [3.0], [8.0]),
                option("slower", Spread.ANY_RANK, [4.0], [8.0]),
                option("lighter", Spread.ANY_RANK, [4.0], [7.0]),
                option("same", Spread.ANY_RANK, [3.0], [8.0]),
                option("column_wise", Spread.ANY_RANK, [2.0, 2.0], [4.0, 4.0]),
                option("table_column_wise", Spread.ONE_HOST, [2.0, 2.0], [4.0, 4.0]),
                option("too_large", Spread.ANY_RANK, [0.1], [11.0]),
            ),
        ),
        np.full((1, 4), 10.0),
        ("HBM",),
        2,
    )
    (left,) = undominated(menus).options
    assert [o.name for o in left] == ["table_wise", "lighter", "column_wise"]


def test_what_cannot_be_exceeded_is_not_looked_at() -> None:
    menus = random_menus(0, 3, 2, 2, 1.2)
    tight = Menus(menus.tables, menus.options, menus.capacity * [[1.0], [0.5]], menus.kinds, 2)
    roomy = Menus(menus.tables, menus.options, menus.capacity * [[1.0], [1e6]], menus.kinds, 2)
    assert undominated(tight).kinds == ("HBM", "host")
    assert undominated(roomy).kinds == ("HBM",)


def test_annealing_in_parts_is_annealing_at_once() -> None:
    menus = undominated(random_menus(5, 6, 2, 2, 1.5))
    problem = flat(menus)
    start = place(problem, problem.begin[:-1].copy(), aim=1_000.0)
    plans = []
    for part in (5_000, 700):
        annealing = Annealing(problem, start, aim=1_000.0, floor=0.0, moves=5_000, seed=3, heat=(0.1, 1e-3), step=1e-3)
        while annealing.run(part):
            pass
        assert annealing.plan is not None
        plans.append(annealing.plan)
    for one, other in zip(*plans, strict=True):
        np.testing.assert_array_equal(one, other)
    fill = held(problem, plans[0])
    assert (fill[1:] <= menus.capacity).all()
    assert rating(problem, plans[0]) == fill[0].max()


@pytest.mark.parametrize("phases", [False, True])
def test_annealing_is_the_same_without_compiled_loops(phases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from flexshard.planner.whole_model import annealing, annealing_kernels, laying_kernels

    menus = undominated(random_menus(7, 4, 2, 2, 1.5, groups=True))
    menus = with_phases(menus, 7) if phases else menus
    problem = flat(menus)
    results = []
    for plain in (False, True):
        if plain:
            for module in (laying_kernels, annealing_kernels, annealing):
                for name, function in list(vars(module).items()):
                    if hasattr(function, "py_func") and name != "copy_into":
                        monkeypatch.setattr(module, name, function.py_func)
        start = place(problem, problem.begin[:-1].copy(), aim=1_000.0)
        walk = Annealing(problem, start, aim=1_000.0, floor=0.0, moves=600, seed=1, heat=(0.1, 1e-3), step=1e-3)
        while walk.run(600):
            pass
        results.append(walk.plan)
    assert results[0] is not None
    assert results[1] is not None
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_plan_every_time() -> None:
    menus = random_menus(12, 14, 2, 4, 1.2)
    first, again = (assign(menus, seconds=600, gap=0.08) for _ in range(2))
    assert first == again
    assert first.finished
    check(menus, first)


def test_time_that_a_program_lacked_without_a_plan_is_given_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that fill all ranks to the byte, which annealing does not find."""
    sizes = (np.random.default_rng(1).dirichlet(np.ones(6), 16) * 2**40).round().ravel()
    menus = Menus(
        tuple(f"t{index}" for index in range(sizes.size)),
        tuple((Option("table_wise", Spread.ANY_RANK, np.ones(1), np.full((1, 1), size)),) for size in sizes),
        np.full((1, 16), 2.0**40 + 6),
        ("HBM",),
        16,
    )
    given = []

    def out_of_time(_: Menus, bins: str, *, seconds: float, **how: Any) -> ProgramAnswer:
        given.append((bins, seconds))
        return ProgramAnswer(0.0, None, out_of_time=True)

    monkeypatch.setattr(master, "solve_menus_program", out_of_time)
    for moves in ("_MOVES", "_PLAIN_MOVES"):
        monkeypatch.setattr(master, moves, (200, 400, 200))
    with pytest.raises(BudgetError, match="before time was up, and there may be one; allow more time"):
        assign(menus, seconds=600)
    assert {bins for bins, _ in given[:-1]} == {"cluster", "hosts", "ranks"}
    assert all(seconds <= 150 for _, seconds in given[:-1])
    assert given[-1][0] == "ranks"
    assert given[-1][1] > 300


def test_time_gives_the_best_plan_so_far_and_its_gap() -> None:
    menus = random_menus(12, 60, 2, 8, 1.3)
    found = assign(menus, seconds=0.3, gap=0.0)
    check(menus, found)
    assert not found.finished
    assert found.gap == pytest.approx(found.rating / found.lower_bound - 1)


def test_nothing_to_plan() -> None:
    menus = Menus((), (), np.full((1, 2), 10.0), ("HBM",), 2)
    assert assign(menus, seconds=1) == Assignment((), (), 0.0, 0.0, finished=True)


def test_what_does_not_fit_is_named_with_its_bytes() -> None:
    def table(*shares: float) -> tuple[Option, ...]:
        return tuple(
            Option(f"{n}", Spread.ANY_RANK, np.ones(1), np.array([[share * 2**20]]), n)
            for n, share in enumerate(shares)
        )

    def menus(*tables: tuple[Option, ...]) -> Menus:
        names = tuple(f"t{n}" for n in range(len(tables)))
        return Menus(names, tables, np.full((1, 2), 10.0 * 2**20), ("HBM",), 2)

    with pytest.raises(BudgetError, match=r"table 't1': .* needs 12 MiB of HBM for it, 2 MiB more than any has"):
        assign(menus(table(1.0), table(14.0, 12.0)), seconds=1)
    with pytest.raises(BudgetError, match=r"need 24 MiB of HBM at least, 4 MiB more .* largest are t1, t2, t0$"):
        assign(menus(table(6.0), table(9.0), table(9.0), table(0.0)), seconds=1)
    with pytest.raises(BudgetError, match=r"no choice of options was found that fits 10 MiB of HBM per rank") as error:
        assign(menus(table(6.0), table(6.0), table(6.0)), seconds=60)
    assert not error.value.by_sums
    assert error.value.least_bytes == 9 * 2**20
    with pytest.raises(BudgetError, match="table 't0' has no option"):
        assign(menus((), table(1.0)), seconds=1)


def test_programs_run_whatever_number_of_threads_ran_before() -> None:
    menus = undominated(random_menus(100, 5, 2, 2, 1.1))
    answers = [solve_menus_program(menus, "ranks", gap=1e-9, seconds=60, threads=threads) for threads in (1, 2, 1)]
    assert all(answer.proven for answer in answers)
    assert [answer.bound for answer in answers] == pytest.approx([answers[0].bound] * 3)


def option(spread: Spread, perf: list[float], memory: list[float]) -> Option:
    return Option(spread.name, spread, np.array(perf, float), np.array([memory], float))


def menus_of(
    tables: list[list[Option]], capacity: list[float], per_host: int, together: tuple[tuple[int, ...], ...] = ()
) -> Menus:
    numbered = tuple(tuple(Option(o.name, o.spread, o.perf, o.memory, i) for i, o in enumerate(t)) for t in tables)
    return Menus(
        tuple(f"t{i}" for i in range(len(tables))), numbered, np.array([capacity], float), ("HBM",), per_host, together
    )


EVERY, BLOCKS, ONE, ANY = Spread.EVERY_RANK, Spread.HOST_BLOCKS, Spread.ONE_HOST, Spread.ANY_RANK


@pytest.mark.parametrize(
    "menus",
    [
        # The best plan is many times the bound: two tables fit, the third has a dear option alone.
        menus_of([[option(ANY, [1], [6]), option(ANY, [30], [0])] for _ in range(3)], [10, 10], 1),
        menus_of([[option(ANY, [1], [6]), option(ANY, [1_000], [0])] for _ in range(3)], [10, 10], 1),
        # One rank a host.
        menus_of([[option(ONE, [1, 1], [1, 1])], [option(EVERY, [1, 1], [1, 1])]], [3, 3], 1),
        # A rank of no host.
        menus_of([[option(ONE, [1, 1, 1], [1, 1, 1])]], [10, 10, 10], 2),
        # Hosts larger than the cluster.
        menus_of([[option(ANY, [1], [1])], [option(ANY, [1], [1])]], [1.5, 1.5], 4),
        # More blocks than hosts, in a group of one host's tables and not.
        menus_of([[option(BLOCKS, [1] * 4, [5] * 4)], [option(ANY, [1], [5])]], [15, 15], 2),
        menus_of([[option(BLOCKS, [1] * 4, [1] * 4)], [option(EVERY, [5, 0, 0], [0] * 3)]], [10] * 3, 1),
        menus_of(
            [[option(BLOCKS, [1] * 4, [1] * 4), option(ONE, [9], [1])], [option(ONE, [1], [1])]], [10] * 4, 2, ((0, 1),)
        ),
        # A rank without memory, costs of nothing, shards of nothing.
        menus_of([[option(ANY, [2], [4])], [option(ANY, [3], [4])], [option(EVERY, [0, 0], [0, 0])]], [0, 9], 1),
        menus_of([[option(ANY, [0], [4])], [option(ONE, [0, 0], [4, 4])]], [9, 9], 2),
    ],
)
def test_corners(menus: Menus) -> None:
    allowed = [tuple(o for o in menu if o.shards != 4 or not menus.together) for menu in menus.options]
    best = exhaustive(menus.with_options(allowed) if menus.together else menus)
    found = assign(menus, seconds=30, gap=EXACT)
    check(menus, found)
    assert found.rating == pytest.approx(best, rel=2 * EXACT)
    assert found.lower_bound <= best * (1 + 2e-6)
    kinds: tuple[Bins, ...] = ("cluster", "hosts", "ranks")
    for bins in kinds:
        assert solve_menus_program(undominated(menus), bins, gap=1e-9, seconds=20).bound <= best * (1 + 2e-6)


@pytest.mark.parametrize(("seed", "scale"), [(1050, 1e5), (1001, 1e7), (1037, 1e-8), (1050, 1e-11), (1001, 1e10)])
def test_bounds_hold_in_any_unit(seed: int, scale: float) -> None:
    menus = random_menus(seed, 4, 2, 2, 1.5)
    scaled = [
        tuple(Option(o.name, o.spread, o.perf * scale, o.memory, o.source) for o in menu) for menu in menus.options
    ]
    best = exhaustive(menus) * scale
    found = assign(menus.with_options(scaled), seconds=20, gap=1e-3)
    assert found.lower_bound <= best * (1 + 2e-6)
    assert best * (1 - 1e-9) <= found.rating <= best * (1 + 1.1e-3)


def test_a_plan_is_found_where_few_are() -> None:
    menus = random_menus(1035, 7, 2, 2, 1.1, groups=True)
    exact = solve_menus_program(undominated(menus), "ranks", gap=1e-9, seconds=60)
    found = assign(menus, seconds=60, gap=EXACT)
    check(menus, found)
    assert found.rating == pytest.approx(exact.bound, rel=2 * EXACT)


def test_a_search_that_time_ends_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though time is left over: what the search would have found depends on the machine."""

    def brief(menus: Menus, bins: Bins, *, seconds: float, **options: Any) -> ProgramAnswer:
        return solve_menus_program(menus, bins, seconds=0.02 if bins == "ranks" else seconds, **options)

    monkeypatch.setattr("flexshard.planner.whole_model.master.solve_menus_program", brief)
    menus = random_menus(12, 14, 2, 4, 1.2)
    assert brief(undominated(menus), "ranks", gap=1e-9, seconds=600).out_of_time
    found = assign(menus, seconds=600, gap=0.04)
    assert not found.finished
    check(menus, found)


def test_a_first_plan_is_waited_for() -> None:
    found = assign(random_menus(12, 60, 2, 8, 1.3), seconds=0.0)
    assert not found.finished
    assert found.rating < np.inf
