"""The page of a plan: whole in one file, of what the plan says, whatever its tables are called."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, Table, solve, units
from flexshard.errors import OutputError, PlanError
from flexshard.executors import Observation
from flexshard.planner import Problem, TableConstraints
from flexshard.report import write_report
from tests.commands import run

ODD = "<script>alert('x')</script> & co"
VOID = {"meta", "i", "br"}
CLUSTER = Cluster.preset("a100-4x8-roce", nodes=2)


class Checked(HTMLParser):
    """Tags that are opened and closed in order, and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID - {"i"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


def problem(number: int = 2, pooling: str = "none", cluster: Cluster = CLUSTER, **how: Any) -> Problem:
    tables = []
    for index in range(number):
        counts = [10**6 // (row + 1) ** (1 + index % 3) + 1 for row in range(500)]
        profile = AccessProfile.from_counts(counts, num_samples=10_000, num_rows=5_000)
        name = ODD if index == 0 else f"t{index}"
        tables.append(Table(name, 5_000, 16, profile, pooling=pooling if index else "none"))
    return Problem(tables, cluster, batch_size=256, **how)


def page_of(plan: Plan, path: Path, **more: object) -> tuple[str, Checked]:
    write_report(plan, path, **more)  # type: ignore[arg-type]
    text = path.read_text()
    parser = Checked()
    parser.feed(text)
    assert not parser.open
    return text, parser


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    asked = problem()
    plan = solve(asked)
    text, parser = page_of(plan, tmp_path / "a.html", problem=asked, job_text="format: flexshard.job\n")
    assert "script" not in parser.seen
    assert all(link.startswith("#") for link in parser.links)
    assert not re.search(r"https?://|url\(", text)
    for said in (
        "What was decided",
        plan.fingerprint,
        "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; co",
        "How skewed the tables are",
        "What memory buys",
        "format: flexshard.job",
        "prefers-color-scheme:dark",
        "the hottest",
    ):
        assert said in text
    for tier in plan.tables[ODD].tiers:
        assert f"{tier.rows:,}" in text
    again = (tmp_path / "a.html").read_bytes()
    page_of(plan, tmp_path / "a.html", problem=asked, job_text="format: flexshard.job\n")
    assert (tmp_path / "a.html").read_bytes() == again


def test_options_beside_the_job_are_said(tmp_path: Path) -> None:
    asked = problem()
    given = problem(budget="+1MiB", tiers=2)
    text, _ = page_of(solve(given), tmp_path / "a.html", problem=asked, job_text="format: flexshard.job")
    assert f"options beside it: budget {given.budget.name}, and not {asked.budget.name}; tiers 2, and not 3." in text
    text, _ = page_of(solve(asked), tmp_path / "a.html", problem=asked, job_text="format: flexshard.job")
    assert "options beside it" not in text


def test_what_is_on_the_host_is_said(tmp_path: Path) -> None:
    host = replace(CLUSTER, host_bytes_per_s=20e9)
    plan = solve(problem(cluster=host, budget="-27.58MB", host_memory="1GiB"))
    assert plan.predicted.host_memory_bytes > 0
    text, _ = page_of(plan, tmp_path / "a.html")
    assert text.count("are in its host&#x27;s memory.") + text.count("are in its host's memory.") == 2
    assert "behind a cache with places for" in text


def test_memory_is_what_the_budget_bounds(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).poisson(5, 500)
    ids = np.minimum(np.random.default_rng(1).zipf(1.2, int(lengths.sum())) - 1, 1_999)
    table = Table("t", 2_000, 16, AccessProfile.from_ids(ids, lengths=lengths, num_rows=2_000))
    asked = Problem([table], CLUSTER, 256, memory="p99.9")
    plan = solve(asked)
    text, _ = page_of(plan, tmp_path / "a.html", problem=asked)
    needed = plan.predicted.static_memory_bytes + (plan.predicted.fullest_dynamic_bytes or 0.0)
    assert plan.predicted.memory_bytes < needed <= plan.settings.budget_bytes
    allowed = units.format_bytes(plan.settings.budget_bytes)
    assert (
        f"A GPU needs at most <b>{units.format_bytes(needed)}</b> in 999 of 1,000 steps; the budget (neutral) allows"
        f" {allowed}." in text
    )
    free = CLUSTER.hbm_bytes - CLUSTER.reserve_bytes
    assert f"Headroom: {units.format_bytes(free - needed)} of" in text
    assert "row by row" not in text.partition("Beyond the budget:")[2].partition("</p>")[0]
    assert f"budget neutral = {allowed} per rank (p99.9)," in str(plan)


def test_pooled_tables_are_shown_by_rank(tmp_path: Path) -> None:
    cut = {"t1": TableConstraints(sharding_types=["row_wise"])}
    plan = solve(replace(problem(12, pooling="sum"), timeout_seconds=5.0, constraints=cut))
    text, _ = page_of(plan, tmp_path / "a.html")
    assert plan.pooled_predicted is not None
    ids = max(plan.predicted.collectives, key=lambda one: one.calls)
    assert ids.calls > 1
    assert f">{units.format_bytes(ids.calls * ids.nbytes)}</td>" in text, "of all calls, as its time is"
    assert "rank 15" in text
    assert "others" in text
    assert "pooled:" in text


def test_bounds_of_a_frontier_are_drawn(tmp_path: Path) -> None:
    few = Cluster.preset("a100-4x8-roce", nodes=1)
    asked = replace(problem(3, pooling="sum", cluster=few), timeout_seconds=5.0)
    text, _ = page_of(solve(asked), tmp_path / "a.html", problem=asked)
    assert 'class="bound"' in text
    assert "memory per GPU (dashed: no plan is below)" in text
    assert "best plan found: " in text
    proven = replace(problem(), index_dedup=True)
    text, _ = page_of(solve(proven), tmp_path / "a.html", problem=proven)
    assert 'class="bound"' not in text
    assert "dashed" not in text
    assert "best plan: " in text


def test_many_tables_are_not_all_drawn(tmp_path: Path) -> None:
    asked = problem(30)
    text, _ = page_of(solve(asked), tmp_path / "a.html", problem=asked)
    assert "The 8 tables that are read most; 22 more are not shown." in text


def test_pages_that_cannot_be(tmp_path: Path) -> None:
    asked = problem()
    plan = solve(asked)
    with pytest.raises(PlanError, match="the job is of other tables than the plan"):
        write_report(plan, tmp_path / "a.html", problem=problem(3))
    for other, why in (
        (replace(asked, batch_size=64), "its batch size is another"),
        (replace(asked, cluster=replace(asked.cluster, hbm_bytes=1e11)), "its tables, their profiles or its cluster"),
    ):
        with pytest.raises(PlanError, match=f"not the one that the plan was made from: {why}"):
            write_report(plan, tmp_path / "a.html", problem=other)
    with pytest.raises(Exception, match="is of plan ffff"):
        write_report(plan, tmp_path / "a.html", observed=Observation("f" * 64, 16, (1.0,), ()))
    with pytest.raises(OutputError, match="cannot write"):
        write_report(plan, tmp_path / "no" / "a.html")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path) -> None:
    plan = solve(problem())
    plan.save(tmp_path / "plan.json")
    done = run(tmp_path, "report", "plan.json", "-o", "a.html")
    assert (done.returncode, done.stdout) == (0, "written to a.html\n")
    assert run(tmp_path, "report", "plan.json", "-o", "a.html").returncode == 0  # its own page
    lost = run(tmp_path, "report", "plan.json", "-o", "plan.json")
    assert lost.returncode == 2
    assert "would be lost" in lost.stderr
    (tmp_path / "notes.txt").write_text("mine")
    assert run(tmp_path, "report", "plan.json", "-o", "notes.txt").returncode == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
