"""Shipped clusters: hardware figures with their sources as YAML, levels derived from the link graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flexshard import units
from flexshard._internal import DocumentFormat, StrictModel, check_int, load_yaml
from flexshard.errors import ClusterError
from flexshard.topologies.cluster import Cluster, CollectiveRate, Level, Source
from flexshard.topologies.cluster_file import LevelSpec, load_cluster
from flexshard.topologies.links import Hardware, bandwidth_bytes_per_s

__all__ = ["Preset", "load_preset", "preset_cluster", "preset_names", "resolve_cluster"]

FORMAT = DocumentFormat("flexshard.preset", 1, "a preset", "flexshard.preset", ClusterError, "install FlexShard again")
_MOST_NODES = 4096


class Figure(StrictModel):
    """A number with where it comes from."""

    value: str | int | float
    source: str
    date: Annotated[str, Field(pattern=r"\d{4}(-\d\d(-\d\d)?)?")]


class Rates(StrictModel):
    """alpha of a call, and the share of the link rate that the collective reaches, on one plane."""

    alpha: Figure
    efficiency: Figure


class Planes(StrictModel):
    """A collective on the scale-up and on the scale-out plane."""

    scale_up: Rates
    scale_out: Rates | None = None


class HardwareSpec(StrictModel):
    """Hardware figures of a preset; per direction."""

    gpus_per_node: Figure
    memory: Figure
    memory_bandwidth: Figure | None = None
    host_bandwidth: Figure | None = None
    scale_up_bandwidth: Figure
    domain_nodes: Figure | None = None
    domain_bandwidth: Figure | None = None
    nics_per_node: Figure | None = None
    nic_speed: Figure | None = None
    nodes_per_leaf: Figure | None = None
    oversubscription: Figure | None = None


class Fitted(StrictModel):
    """Levels measured or fitted on a cluster of so many nodes; other sizes scale them by the link graph."""

    nodes: int
    levels: list[LevelSpec]


class PresetSpec(StrictModel):
    """A preset file."""

    name: str
    title: str
    default_nodes: int
    figures: Source = "datasheet"
    reserve: Figure
    hardware: HardwareSpec
    all_to_all: Planes | None = None
    all_reduce: Planes | None = None
    fitted: Fitted | None = None


def _bandwidth(figure: Figure | None) -> float | None:
    return None if figure is None else units.parse_bandwidth(str(figure.value))


@dataclass(frozen=True)
class Preset:
    """A shipped cluster whose number of nodes is a parameter."""

    spec: PresetSpec

    @property
    def name(self) -> str:
        """What ``Cluster.preset`` calls it."""
        return self.spec.name

    @property
    def title(self) -> str:
        """One line that describes it."""
        return self.spec.title

    def figures(self) -> list[tuple[str, str, str, str]]:
        """Every figure of the preset as (field, value, source, date)."""
        figures: list[tuple[str, str, str, str]] = []
        _collect("", self.spec.model_dump(), figures)
        return figures

    def hardware(self, nodes: int) -> Hardware:
        """The hardware of a cluster of so many nodes."""
        spec = self.spec.hardware
        domain_nodes = nodes if spec.domain_nodes is None else _int_of(spec.domain_nodes)
        return Hardware(
            nodes=nodes,
            gpus_per_node=_int_of(spec.gpus_per_node),
            scale_up_bytes_per_s=units.parse_bandwidth(str(spec.scale_up_bandwidth.value)),
            domain_nodes=domain_nodes,
            domain_bytes_per_s=(
                None if spec.domain_bandwidth is None else units.parse_bandwidth(str(spec.domain_bandwidth.value))
            ),
            nics_per_node=1 if spec.nics_per_node is None else _int_of(spec.nics_per_node),
            nic_bytes_per_s=1.0 if spec.nic_speed is None else units.parse_bandwidth(str(spec.nic_speed.value)),
            nodes_per_leaf=None if spec.nodes_per_leaf is None else _int_of(spec.nodes_per_leaf),
            oversubscription=1.0 if spec.oversubscription is None else float(spec.oversubscription.value),
        )

    def cluster(self, nodes: int | None = None) -> Cluster:
        """A cluster of so many nodes (the preset's own number by default).

        Raises:
            ClusterError: fewer than one node, or a number that the hardware cannot have.
        """
        nodes = self.spec.default_nodes if nodes is None else nodes
        nodes = check_int(nodes, f"preset {self.name!r}: nodes", ClusterError)
        if nodes > _MOST_NODES:
            raise ClusterError(f"preset {self.name!r}: at most {_MOST_NODES:,} nodes, found {nodes:,}")
        hardware = self.hardware(nodes)
        levels = tuple(self._level(hardware, size) for size in hardware.group_sizes())
        return Cluster(
            name=self.name if nodes == self.spec.default_nodes else f"{self.name}:{nodes}",
            nodes=nodes,
            ranks_per_node=hardware.gpus_per_node,
            hbm_bytes=units.parse_bytes(str(self.spec.hardware.memory.value)),
            reserve_bytes=units.parse_bytes(str(self.spec.reserve.value)),
            levels=levels,
            hbm_bytes_per_s=_bandwidth(self.spec.hardware.memory_bandwidth),
            host_bytes_per_s=_bandwidth(self.spec.hardware.host_bandwidth),
            ranks_per_link=max(1, hardware.gpus_per_node // hardware.nics_per_node)
            if self.spec.hardware.nics_per_node
            else 1,
        )

    def _level(self, hardware: Hardware, size: int) -> Level:
        return Level(
            size,
            self._rate(hardware, "all_to_all", size) if size > 1 else None,
            self._rate(hardware, "all_reduce", size) if size < hardware.world_size else None,
        )

    def _rate(self, hardware: Hardware, kind: str, size: int) -> CollectiveRate:
        if self.spec.fitted is not None:
            return self._scaled(self.spec.fitted, hardware, kind, size)
        link_rate, plane = bandwidth_bytes_per_s(hardware, kind, size)
        planes: Planes | None = getattr(self.spec, kind)
        rates: Rates | None = None if planes is None else getattr(planes, plane)
        if rates is None:
            raise ClusterError(f"preset {self.name!r}: no {kind} figures for the {plane} plane")
        note = (
            f"{units.format_bandwidth(link_rate)} at link rate x {rates.efficiency.value} ({rates.efficiency.source});"
            f" alpha: {rates.alpha.source}"
        )
        alpha_seconds = units.parse_seconds(str(rates.alpha.value))
        return CollectiveRate(alpha_seconds, link_rate * float(rates.efficiency.value), self.spec.figures, note)

    def _scaled(self, fitted: Fitted, hardware: Hardware, kind: str, size: int) -> CollectiveRate:
        """A fitted rate, carried over to another number of nodes by the ratio of the link graph's bandwidths."""
        reference = self.hardware(fitted.nodes)
        # The outermost level stays the outermost one; inner levels keep their size.
        if size == hardware.world_size:
            same = reference.world_size if hardware.nodes > hardware.domain_nodes else reference.gpus_per_node
        else:
            same = size
        spec = next((level for level in fitted.levels if level.group_size == same), None)
        rate_spec = None if spec is None else getattr(spec, kind)
        if rate_spec is None:
            raise ClusterError(f"preset {self.name!r}: no fitted {kind} for group size {size}")
        rate: CollectiveRate = rate_spec.rate()
        if hardware == reference:
            return rate
        now, _ = bandwidth_bytes_per_s(hardware, kind, size)
        then, _ = bandwidth_bytes_per_s(reference, kind, same)
        source: Source = rate.source
        note = f"{rate.note}; scaled from {fitted.nodes} nodes by the link graph"
        return CollectiveRate(rate.alpha_seconds, rate.bytes_per_s * now / then, source, note)


def _int_of(figure: Figure) -> int:
    return int(figure.value)


def _collect(path: str, value: Any, figures: list[tuple[str, str, str, str]]) -> None:
    if isinstance(value, list):
        value = {str(entry.get("group_size")): entry for entry in value}
    if not isinstance(value, dict):
        return
    if "source" in value and "value" in value:
        figures.append((path, str(value["value"]), value["source"], value["date"]))
    elif "alpha" in value and "beta" in value:
        figure = f"{units.format_seconds(value['alpha'])}, {units.format_bandwidth(value['beta'])}"
        figures.append((path, figure, f"{value['source']}: {value['note']}", ""))
    else:
        for key, child in value.items():
            _collect(f"{path}.{key}".lstrip("."), child, figures)


@cache
def load_preset(name: str) -> Preset:
    """A shipped preset by name.

    Raises:
        ClusterError: there is none of that name; lists the names.
    """
    if name not in preset_names():
        raise ClusterError(f"no cluster preset is called {name!r}; there are {', '.join(preset_names())}")
    with resources.as_file(resources.files(__package__) / "presets" / f"{name}.yaml") as path:
        spec, _ = load_yaml(path, PresetSpec, FORMAT)
    return Preset(spec)


def preset_cluster(name: str, nodes: int | None = None) -> Cluster:
    """See :meth:`Cluster.preset`."""
    if not isinstance(name, str):
        raise ClusterError(f"a preset's name is a text, found {name!r}; there are {', '.join(preset_names())}")
    return load_preset(name).cluster(nodes)


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets, in alphabetical order."""
    folder = resources.files(__package__) / "presets"
    return tuple(sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no name that a file could have
        return False


def resolve_cluster(name: str) -> Cluster:
    """A cluster from a file, a preset, or ``preset:nodes``; see :meth:`Cluster.resolve`."""
    preset, _, nodes = name.partition(":")
    if preset in preset_names():
        if nodes and not (nodes.isdecimal() and len(nodes) < 10):
            most = f"a whole number up to {_MOST_NODES:,}"
            raise ClusterError(f"{name!r}: the number of nodes after ':' is {most}, found {nodes!r}")
        return load_preset(preset).cluster(int(nodes) if nodes else None)
    if Path(name).suffix in {".yaml", ".yml"} or (name and _exists(name)):
        return load_cluster(name)
    raise ClusterError(
        f"{name!r} is neither a cluster file nor a preset; presets are {', '.join(preset_names())}"
        " (write preset:nodes for another number of nodes)"
    )
