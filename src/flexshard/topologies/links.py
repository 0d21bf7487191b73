"""The link graph of a cluster, and the bandwidth of a collective from its most loaded link.

Two planes connect the GPUs. The *scale-up* plane (NVLink, NVSwitch) joins the GPUs of a domain: a node, or a rack
of nodes. The *scale-out* plane leads from a GPU over its NIC and the leaf switch to the spine. Two ranks of one
domain talk over the scale-up plane, all others over scale-out. Links are full duplex and clusters are symmetric, so
the load of a link is counted in one direction.

Traffic of one call, per byte of one rank's buffer:

* all-to-all in groups of g: each rank sends 1/g to every other member of its group;
* all-reduce over k copies: rings. Each member passes on 2(k-1)/k. Where a domain holds m members, m rings with 1/m
  of the data each leave it over different members' NICs, as NCCL builds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np

from flexshard.errors import ClusterError

__all__ = ["Hardware", "bandwidth_bytes_per_s", "link_graph", "link_loads"]


@dataclass(frozen=True)
class Hardware:
    """What a cluster is built of. Bandwidths are per direction.

    Attributes:
        nodes, gpus_per_node: N and W.
        scale_up_bytes_per_s: one GPU's link into its scale-up domain.
        domain_nodes: nodes that share one scale-up domain (18 for an NVL72 rack, 1 for a DGX).
        domain_bytes_per_s: what the whole domain can carry at once, where that is less than its links together (a
            host's memory, a PCIe root); None for a non-blocking switch.
        nics_per_node, nic_bytes_per_s: scale-out cards; the GPUs of a node share them evenly.
        nodes_per_leaf: nodes below one leaf switch; by default about 32, in whole domains.
        oversubscription: ratio of a leaf's capacity down to its capacity up; 1 is non-blocking.
    """

    nodes: int
    gpus_per_node: int
    scale_up_bytes_per_s: float
    nics_per_node: int
    nic_bytes_per_s: float
    domain_nodes: int = 1
    domain_bytes_per_s: float | None = None
    nodes_per_leaf: int | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.nodes > self.domain_nodes and self.nodes % self.domain_nodes:
            raise ClusterError(
                f"{self.nodes} nodes do not fill scale-up domains of {self.domain_nodes};"
                f" use a multiple of {self.domain_nodes}, or fewer than that"
            )
        if self.nics_per_node < 1 or (
            self.gpus_per_node % self.nics_per_node and self.nics_per_node % self.gpus_per_node
        ):
            raise ClusterError(f"{self.nics_per_node} NICs do not share out evenly to {self.gpus_per_node} GPUs")
        if self.nodes > self.domain_nodes and self.leaf_nodes % self.domain_nodes:
            raise ClusterError(
                f"a leaf of {self.leaf_nodes} nodes cuts through scale-up domains of {self.domain_nodes};"
                f" use a multiple of {self.domain_nodes}"
            )
        if self.oversubscription < 1:
            raise ClusterError(f"oversubscription must be at least 1, found {self.oversubscription}")

    @property
    def world_size(self) -> int:
        """U = W·N."""
        return self.nodes * self.gpus_per_node

    @property
    def leaf_nodes(self) -> int:
        """Nodes below one leaf switch."""
        if self.nodes_per_leaf is not None:
            return self.nodes_per_leaf
        return max(1, 32 // self.domain_nodes) * self.domain_nodes

    @property
    def domain_size(self) -> int:
        """GPUs of one scale-up domain."""
        return self.gpus_per_node * min(self.domain_nodes, self.nodes)

    def group_sizes(self) -> tuple[int, ...]:
        """Natural sharding groups: 1, the node, the scale-up domain, all."""
        sizes = {1, self.gpus_per_node, self.domain_size, self.world_size}
        return tuple(sorted(size for size in sizes if self.world_size % size == 0))


def link_graph(hardware: Hardware) -> nx.DiGraph[str]:
    """Every link in the sending direction, as a graph from GPUs to domains and over NICs and leaves to the spine.

    Edges carry ``plane`` ("scale_up" or "scale_out"), ``capacity`` in bytes/s, and ``first`` and ``last``: the
    half-open range of the ranks that send over it.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    width, domain = hardware.gpus_per_node, hardware.domain_size
    per_node = min(hardware.nics_per_node, width)  # several NICs of one GPU act as one, faster
    share = width // per_node
    nic_rate = hardware.nic_bytes_per_s * hardware.nics_per_node / per_node
    for rank in range(hardware.world_size):
        up = {"plane": "scale_up", "first": rank, "last": rank + 1}
        graph.add_edge(f"gpu{rank}", f"domain{rank // domain}", capacity=hardware.scale_up_bytes_per_s, **up)
    if hardware.domain_bytes_per_s is not None:
        for index in range(hardware.world_size // domain):
            span = {"first": index * domain, "last": (index + 1) * domain}
            rate = hardware.domain_bytes_per_s
            graph.add_edge(f"domain{index}", f"backplane{index}", plane="scale_up", capacity=rate, **span)
    if hardware.nodes <= hardware.domain_nodes:
        return graph
    for nic in range(hardware.nodes * per_node):
        first, leaf = nic * share, nic * share // (width * hardware.leaf_nodes)
        span = {"first": first, "last": first + share}
        graph.add_edge(f"nic{nic}", f"leaf{leaf}", plane="scale_out", capacity=nic_rate, **span)
    leaf_ranks = hardware.leaf_nodes * width
    for index, first in enumerate(range(0, hardware.world_size, leaf_ranks)):
        last = min(first + leaf_ranks, hardware.world_size)
        rate = nic_rate * (last - first) / share / hardware.oversubscription
        graph.add_edge(f"leaf{index}", "spine", plane="scale_out", capacity=rate, first=first, last=last)
    return graph


def link_loads(hardware: Hardware, graph: nx.DiGraph[str], kind: str, group_size: int) -> dict[tuple[str, str], float]:
    """Bytes that each link carries in one call, per byte of one rank's buffer.

    Args:
        kind: "all_to_all" (inside groups of ``group_size`` consecutive ranks) or "all_reduce" (across them, between
            the ranks of equal position in their group).
    """
    edges = list(graph.edges(data=True))
    first = np.array([data["first"] for _, _, data in edges], dtype=np.int64)
    last = np.array([data["last"] for _, _, data in edges], dtype=np.int64)
    scale_up = np.array([data["plane"] == "scale_up" for _, _, data in edges])
    count = _all_to_all_load if kind == "all_to_all" else _all_reduce_load
    loads = count(hardware, first, last, scale_up, group_size)
    return {(source, target): float(load) for (source, target, _), load in zip(edges, loads, strict=True)}


IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


def _all_to_all_load(hw: Hardware, first: IntArray, last: IntArray, scale_up: BoolArray, group: int) -> FloatArray:
    near = min(group, hw.domain_size)  # members of a rank's group inside its own domain; sizes are nested
    senders = (last - first).astype(np.float64)
    # Members under the same link do not cross it, except that a domain's own links carry all that stays inside it.
    below = np.minimum(np.maximum(last - first, near), group)
    return senders / group * np.where(scale_up, near - 1, group - below)


def _all_reduce_load(hw: Hardware, first: IntArray, last: IntArray, scale_up: BoolArray, group: int) -> FloatArray:
    copies = hw.world_size // group
    members = max(1, hw.domain_size // group)  # of one ring, in one domain
    passed = 2 * (copies - 1) / copies
    inside = passed * (1.0 if members == copies else (members - 1) / members)
    span = (last - first).astype(np.float64)
    # A group of ranks below a link holds members of min(span, group) rings, max(1, span/group) of each.
    crossing = np.minimum(span, group) * np.minimum(1.0, np.maximum(1.0, span / group) / members)
    contains_all = (first == 0) & (last == hw.world_size)
    outside = np.where(contains_all | (members == copies), 0.0, passed * crossing)
    return np.where(scale_up, inside * span, outside)


def bandwidth_bytes_per_s(hardware: Hardware, kind: str, group_size: int) -> tuple[float, str]:
    """Algorithm bandwidth of a collective when its most loaded link is full, and that link's plane.

    Returns:
        bytes/s at link rate (multiply by an efficiency), and "scale_up" or "scale_out".
    """
    graph = link_graph(hardware)
    loads = link_loads(hardware, graph, kind, group_size)
    link = max(loads, key=lambda edge: loads[edge] / graph.edges[edge]["capacity"])
    if loads[link] == 0:
        raise ClusterError(f"{kind} at group size {group_size} moves nothing on this cluster")
    return float(graph.edges[link]["capacity"] / loads[link]), str(graph.edges[link]["plane"])
