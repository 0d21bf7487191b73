"""Bandwidths from the link graph, by hand and by following every byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flexshard.errors import ClusterError
from flexshard.topologies import Hardware, bandwidth_bytes_per_s, link_graph, link_loads

# 4 nodes of 8 GPUs; NVLink 300 GB/s, one NIC of 25 GB/s per GPU.
DGX = Hardware(nodes=4, gpus_per_node=8, scale_up_bytes_per_s=300e9, nics_per_node=8, nic_bytes_per_s=25e9)


def test_all_to_all_inside_a_node_is_bound_by_nvlink() -> None:
    # Each GPU sends 7/8 of its buffer over its own NVLink: 300 GB/s · 8/7.
    assert bandwidth_bytes_per_s(DGX, "all_to_all", 8) == (pytest.approx(300e9 * 8 / 7), "scale_up")


def test_all_to_all_of_all_ranks_is_bound_by_the_nics() -> None:
    # 24 of 32 parts leave the node over the GPU's own NIC: 25 GB/s · 32/24.
    assert bandwidth_bytes_per_s(DGX, "all_to_all", 32) == (pytest.approx(25e9 * 32 / 24), "scale_out")


def test_all_reduce_across_nodes_is_a_ring_of_nics() -> None:
    # Four copies, one per node: each NIC passes on 2·3/4 of the buffer.
    assert bandwidth_bytes_per_s(DGX, "all_reduce", 8) == (pytest.approx(25e9 / 1.5), "scale_out")


def test_all_reduce_of_all_ranks_spreads_over_all_nics_of_a_node() -> None:
    # 2·31/32 of the buffer leaves a node once, over 8 NICs; NVLink carries 7/8 of that per GPU.
    nic, nvlink = 8 * 25e9 / (2 * 31 / 32), 300e9 / (2 * 31 / 32 * 7 / 8)
    assert nic < nvlink
    assert bandwidth_bytes_per_s(DGX, "all_reduce", 1) == (pytest.approx(nic), "scale_out")


def test_two_gpus_that_share_a_nic_halve_its_bandwidth() -> None:
    # p4d: 4 NICs of 12.5 GB/s for 8 GPUs.
    p4d = Hardware(nodes=4, gpus_per_node=8, scale_up_bytes_per_s=300e9, nics_per_node=4, nic_bytes_per_s=12.5e9)
    assert bandwidth_bytes_per_s(p4d, "all_to_all", 32)[0] == pytest.approx(6.25e9 * 32 / 24)
    assert bandwidth_bytes_per_s(p4d, "all_reduce", 8)[0] == pytest.approx(6.25e9 / 1.5)
    assert bandwidth_bytes_per_s(p4d, "all_reduce", 1)[0] == pytest.approx(50e9 / (2 * 31 / 32))


def test_four_nics_of_one_gpu_act_as_one() -> None:
    p5 = Hardware(nodes=4, gpus_per_node=8, scale_up_bytes_per_s=450e9, nics_per_node=32, nic_bytes_per_s=12.5e9)
    assert bandwidth_bytes_per_s(p5, "all_to_all", 32)[0] == pytest.approx(50e9 * 32 / 24)


def test_an_oversubscribed_leaf_is_the_bottleneck() -> None:
    # Two leaves of two nodes; a leaf's 16 NICs share half their bandwidth upwards. 16 of 32 parts cross.
    thin = Hardware(
        nodes=4,
        gpus_per_node=8,
        scale_up_bytes_per_s=300e9,
        nics_per_node=8,
        nic_bytes_per_s=25e9,
        nodes_per_leaf=2,
        oversubscription=4.0,
    )
    assert bandwidth_bytes_per_s(thin, "all_to_all", 32)[0] == pytest.approx(25e9 / 4 * 32 / 16)


def test_ranks_of_one_rack_talk_over_nvlink_whatever_their_node() -> None:
    rack = Hardware(
        nodes=36, gpus_per_node=4, scale_up_bytes_per_s=900e9, nics_per_node=4, nic_bytes_per_s=50e9, domain_nodes=18
    )
    assert rack.group_sizes() == (1, 4, 72, 144)
    assert bandwidth_bytes_per_s(rack, "all_to_all", 72) == (pytest.approx(900e9 * 72 / 71), "scale_up")
    # 36 copies of a group of 4, 18 in each rack: 2·35/36 leaves the rack once per group, over 18 NICs each.
    assert bandwidth_bytes_per_s(rack, "all_reduce", 4) == (pytest.approx(18 * 50e9 / (2 * 35 / 36)), "scale_out")
    assert bandwidth_bytes_per_s(rack, "all_reduce", 72) == (pytest.approx(50e9), "scale_out")


def test_a_host_that_all_processes_share() -> None:
    host = Hardware(
        nodes=2,
        gpus_per_node=2,
        scale_up_bytes_per_s=4e9,
        nics_per_node=1,
        nic_bytes_per_s=1.0,
        domain_nodes=2,
        domain_bytes_per_s=4e9,
    )
    # Four ranks send 3/4 each through one memory: 4 GB/s / 3.
    assert bandwidth_bytes_per_s(host, "all_to_all", 4)[0] == pytest.approx(4e9 / 3)
    assert bandwidth_bytes_per_s(host, "all_to_all", 2)[0] == pytest.approx(4e9 / 2)


def test_hardware_that_does_not_fit_together() -> None:
    with pytest.raises(ClusterError, match="multiple of 18"):
        Hardware(20, 4, 900e9, 4, 50e9, domain_nodes=18)
    with pytest.raises(ClusterError, match="3 NICs"):
        Hardware(2, 8, 300e9, 3, 25e9)
    with pytest.raises(ClusterError, match="oversubscription"):
        Hardware(2, 8, 300e9, 8, 25e9, oversubscription=0.5)


@st.composite
def hardware(draw: st.DrawFn) -> Hardware:
    width = draw(st.sampled_from([1, 2, 4]))
    domain_nodes = draw(st.sampled_from([1, 2]))
    nodes = domain_nodes * draw(st.sampled_from([1, 2, 4]))
    nics = draw(st.sampled_from([n for n in (1, 2, 4, 8) if width % n == 0 or n % width == 0]))
    per_leaf = draw(st.sampled_from([1, 2, 4])) * domain_nodes
    return Hardware(nodes, width, 300e9, nics, 25e9, domain_nodes, 1e12, per_leaf, draw(st.sampled_from([1.0, 3.0])))


@given(hardware())
def test_all_to_all_loads_equal_those_of_every_single_flow(hw: Hardware) -> None:
    graph = link_graph(hw)
    for group in hw.group_sizes()[1:]:
        expected = dict.fromkeys(graph.edges, 0.0)
        for source in range(hw.world_size):
            first = source // group * group
            for target in range(first, first + group):
                if target == source:
                    continue
                near = source // hw.domain_size == target // hw.domain_size
                for edge, data in graph.edges.items():
                    under_source = data["first"] <= source < data["last"]
                    under_target = data["first"] <= target < data["last"]
                    if data["plane"] == "scale_up" and near and under_source:
                        expected[edge] += 1 / group
                    if data["plane"] == "scale_out" and not near and under_source and not under_target:
                        expected[edge] += 1 / group
        loads = link_loads(hw, graph, "all_to_all", group)
        for edge, load in expected.items():
            assert loads[edge] == pytest.approx(load, abs=1e-12), (edge, group)


@given(hardware())
def test_all_reduce_loads_equal_those_of_every_ring(hw: Hardware) -> None:
    graph = link_graph(hw)
    for group in hw.group_sizes()[:-1]:
        copies = hw.world_size // group
        expected = dict.fromkeys(graph.edges, 0.0)
        for position in range(group):
            members = np.arange(position, hw.world_size, group)
            inside = max(1, hw.domain_size // group)
            for rotation in range(inside):  # one ring per member of a domain, each leaving over another's NIC
                order = np.concatenate([np.roll(part, rotation) for part in np.split(members, copies // inside)])
                for source, target in zip(order, np.roll(order, -1), strict=True):
                    share = 2 * (copies - 1) / copies / inside
                    near = source // hw.domain_size == target // hw.domain_size
                    for edge, data in graph.edges.items():
                        under_source = data["first"] <= source < data["last"]
                        under_target = data["first"] <= target < data["last"]
                        if near and data["plane"] == "scale_up" and under_source:
                            expected[edge] += share
                        if not near and data["plane"] == "scale_out" and under_source and not under_target:
                            expected[edge] += share
        loads = link_loads(hw, graph, "all_reduce", group)
        for edge, load in expected.items():
            assert loads[edge] == pytest.approx(load, abs=1e-12), (edge, group)
