from __future__ import annotations

from pathlib import Path

import pytest

from flexshard import Cluster
from flexshard.errors import ClusterError
from flexshard.topologies import CollectiveRate, Level, load_preset, preset_names

RATE = CollectiveRate(1e-5, 1e9)

GOOD = """\
format: flexshard.cluster
version: 1
name: mine
nodes: 2
ranks_per_node: 4
memory: 40 GB
reserve: 4 GB
levels:
  - group_size: 1
    all_reduce: {alpha: 20 us, beta: 50 GB/s, source: measured}
  - group_size: 4
    all_to_all: {alpha: 10 us, beta: 200 GB/s, source: measured}
    all_reduce: {alpha: 20 us, beta: 10 GB/s, source: measured}
  - group_size: 8
    all_to_all: {alpha: 50 us, beta: 200 Gbps, source: measured}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    cluster = Cluster.load(write(tmp_path, GOOD))
    assert cluster.world_size == 8
    assert cluster.group_sizes == (1, 4, 8)
    assert cluster.hbm_bytes == 40e9
    outer = cluster.level(8).all_to_all
    assert outer is not None
    assert (outer.alpha_seconds, outer.bytes_per_s) == (pytest.approx(5e-5), 25e9)
    assert outer.seconds(25e9) == pytest.approx(1.00005)


def test_memory_bandwidth_and_shared_links(tmp_path: Path) -> None:
    plain = Cluster.load(write(tmp_path, GOOD))
    assert (plain.hbm_bytes_per_s, plain.ranks_per_link) == (None, 1)
    more = GOOD.replace("reserve: 4 GB", "reserve: 4 GB\nmemory_bandwidth: 2039 GB/s\nranks_per_link: 2")
    cluster = Cluster.load(write(tmp_path, more))
    assert (cluster.hbm_bytes_per_s, cluster.ranks_per_link) == (2.039e12, 2)
    assert (cluster.ranks_on_link(4), cluster.ranks_on_link(8)) == (1, 2)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
    for wrong in ("ranks_per_link: 5", "ranks_per_link: 0"):
        with pytest.raises(ClusterError, match="ranks_per_link must be 1 to the 4 of a node"):
            Cluster.load(write(tmp_path, more.replace("ranks_per_link: 2", wrong)))
    assert Cluster.preset("aws-p4d").ranks_per_link == 2  # 8 GPUs, 4 NICs
    assert Cluster.preset("dgx-h100").ranks_per_link == 1
    assert Cluster.preset("gloo-localhost").hbm_bytes_per_s is None


def test_a_stored_file_of_version_1_still_loads(tmp_path: Path) -> None:
    assert Cluster.load(Path(__file__).parent / "cluster_v1.yaml") == Cluster.load(write(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory: 40 GB", "memory: 40", r":6: memory: 40 is a size without a unit"),
        ("memory: 40 GB", "memory: 40 apples", r":6: memory: '40 apples' has the unit 'apples'"),
        ("beta: 200 GB/s", "beta: 200 GB", r":12: levels\[1\].all_to_all.beta: '200 GB' has the unit"),
        ("alpha: 10 us, ", "", r":12: levels\[1\].all_to_all.alpha: this field is required"),
        ("nodes: 2", "nodes: two", r":4: nodes: Input should be a valid integer"),
        ("nodes: 2", "nodes: 3", r":8: levels: levels must start with group size 1 and end with all 12 ranks"),
        ("group_size: 4", "group_size: 3", r":11: levels\[1\]: group size 3 does not divide the 8 ranks"),
        ("group_size: 4", "group_size: 1", r":11: levels\[1\]: group sizes must grow"),
        ("reserve: 4 GB", "reserve: 50 GB", r":7: reserve: reserve must be at least 0 and below memory"),
        ("beta: 10 GB/s", "beta: -10 GB/s", r":11: levels\[1\]: beta must be a bandwidth above 0"),
        ("version: 1", "version: 9", r":2: version: version 9 of flexshard.cluster is unknown"),
        ("format: flexshard.cluster", "format: other", r":1: format: expected 'format: flexshard.cluster'"),
        ("name: mine", "name: mine\ncolour: red", r":4: colour: this field is unknown"),
        ("name: mine", 'name: ""', r":3: name: a cluster's name is a text of one line, found ''"),
        ("name: mine", "name: [mine", r":\d+: not valid YAML"),
        ("name: mine", "name: &x [*x]", r"not valid YAML: something in it is a part of itself"),
        ("nodes: 2", "nodes: 2e1", r":4: nodes: YAML takes 2e1 for a text; write 20"),
        ("nodes: 2", "nodes: 2e-1", r":4: nodes: YAML takes 2e-1 for a text; write 2.0e-1"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value)


def test_missing_levels_are_named(tmp_path: Path) -> None:
    without = GOOD[: GOOD.index("  - group_size: 8")]
    with pytest.raises(ClusterError, match=r":8: levels: levels must start with group size 1 and end with all 8 ranks"):
        Cluster.load(write(tmp_path, without))
    lacking = GOOD.replace("    all_to_all: {alpha: 10 us, beta: 200 GB/s, source: measured}\n", "")
    with pytest.raises(ClusterError, match=r"levels\[1\]: the level of group size 4 needs all_to_all"):
        Cluster.load(write(tmp_path, lacking))
    spare = GOOD.replace(
        "  - group_size: 1\n", "  - group_size: 1\n    all_to_all: {alpha: 1 s, beta: 1 B/s, source: fitted}\n"
    )
    with pytest.raises(ClusterError, match="has nobody to exchange with"):
        Cluster.load(write(tmp_path, spare))


def test_all_gather_and_reduce_scatter_are_the_files_or_derived(tmp_path: Path) -> None:
    plain = Cluster.load(write(tmp_path, GOOD)).level(1)
    assert plain.all_gather is not None
    assert plain.all_gather == plain.reduce_scatter
    assert (plain.all_gather.alpha_seconds, plain.all_gather.bytes_per_s) == (pytest.approx(2e-5), 1e11)
    own = "    reduce_scatter: {alpha: 7 us, beta: 60 GB/s, source: measured}\n  - group_size: 4\n"
    cluster = Cluster.load(write(tmp_path, GOOD.replace("  - group_size: 4\n", own)))
    level = cluster.level(1)
    assert level.reduce_scatter is not None
    assert level.reduce_scatter.bytes_per_s == 6e10
    assert level.all_gather == plain.all_gather
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
    with pytest.raises(ClusterError, match=r"levels\[2\]\.all_gather: .* has no other groups; remove its all_gather"):
        Cluster.load(write(tmp_path, GOOD + "    all_gather: {alpha: 7 us, beta: 60 GB/s, source: measured}\n"))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no such file"):
        Cluster.load(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match="expected a YAML mapping"):
        Cluster.load(write(tmp_path, ""))


def test_one_rank_and_more_than_two_levels() -> None:
    assert Cluster("one", 1, 1, 1e9, 0.0, (Level(1),)).world_size == 1
    pods = Cluster(
        "pods", 16, 4, 1e9, 0.0, (Level(1, None, RATE), *(Level(g, RATE, RATE) for g in (4, 16, 32)), Level(64, RATE))
    )
    assert pods.group_sizes == (1, 4, 16, 32, 64)
    with pytest.raises(ClusterError, match=r"no level with group size 8; it has \[1, 4, 16, 32, 64\]"):
        pods.level(8)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_round_trips_at_several_sizes(name: str, tmp_path: Path) -> None:
    step = 18 if name.startswith("gb200") else 1
    for nodes in (1, 2 * step, 128 * step):
        cluster = Cluster.preset(name, nodes=nodes)
        assert cluster.nodes == nodes
        assert cluster.ranks_per_node in cluster.group_sizes
        cluster.save(tmp_path / "c.yaml")
        assert Cluster.load(tmp_path / "c.yaml") == cluster
        assert Cluster.resolve(f"{name}:{nodes}") == cluster


def test_the_presets_of_the_design_are_all_there() -> None:
    assert set(preset_names()) == {
        "a100-4x8-roce",
        "aws-p4d",
        "aws-p5",
        "azure-ndv4",
        "dgx-a100",
        "dgx-h100",
        "gb200-nvl72",
        "gloo-localhost",
        "h200",
    }


def test_a_fitted_preset_scales_by_the_link_graph() -> None:
    here, larger = Cluster.preset("a100-4x8-roce"), Cluster.preset("a100-4x8-roce", nodes=16)
    before, after = here.level(32).all_to_all, larger.level(128).all_to_all
    assert before is not None
    assert after is not None
    # 24 of 32 parts leave a node of four, 120 of 128 a node of sixteen.
    assert after.bytes_per_s == pytest.approx(before.bytes_per_s * (24 / 32) / (120 / 128))
    assert "scaled" in after.note


def test_unknown_names() -> None:
    with pytest.raises(ClusterError, match=r"no cluster preset is called 'dgx'; there are a100-4x8-roce, "):
        load_preset("dgx")
    with pytest.raises(ClusterError, match="neither a cluster file nor a preset"):
        Cluster.resolve("dgx")
    with pytest.raises(ClusterError, match="is a whole number up to 4,096, found 'many'"):
        Cluster.resolve("dgx-h100:many")
    with pytest.raises(ClusterError, match="nodes must be at least 1"):
        Cluster.resolve("dgx-h100:0")
