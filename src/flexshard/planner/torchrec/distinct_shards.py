"""TorchRec's enumerator, with its estimators asked once per distinct shard of an option rather than once per rank.

Row-wise over 1,000 ranks has two or three different shards; the enumerator prices all 1,000. Its estimators look at a
shard's size and at nothing else of it, so equal sizes get equal costs; what is planned is priced in full afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator as FacadePerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import Enumerator, ModuleSharder, Shard, ShardingOption

__all__ = ["PricedOption", "enumerate_options", "priced", "priced_in_full"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PricedOption:
    """An option of the search space.

    Attributes:
        option: TorchRec's, with costs and bytes of every shard.
        perf: cost of every shard; shape (shards,).
        storage: bytes of HBM, host memory and SSD of every shard; shape (3, shards).
    """

    option: ShardingOption
    perf: FloatArray
    storage: FloatArray


def enumerate_options(
    enumerator: Enumerator, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], *, whole: bool = False
) -> list[PricedOption]:
    """The search space of an enumerator, which keeps it for whoever asks for it next, as TorchRec's does.

    An enumerator or estimators of other kinds than TorchRec's own, or that were patched, may look at an option's shards
    together: they are asked as they are, as with ``whole``.
    """
    if whole:  # not what was priced by size before
        vars(enumerator)["_last_stored_module"] = None
    cached = vars(enumerator).get("_last_stored_module") is module  # what the enumerator has, it gives as it is
    if cached or whole or not _by_shard_size(enumerator):
        return [priced(option) for option in enumerator.enumerate(module, list(sharders))]
    # A copy, so that what is changed here is not the caller's.
    shadow = cast("EmbeddingEnumerator", copy.copy(enumerator))
    left_out: dict[int, tuple[list[Shard], npt.NDArray[np.int64]]] = {}

    def populate(options: list[ShardingOption]) -> None:
        for option in options:
            distinct, which = _distinct(option.shards)
            left_out[id(option)] = (option.shards, which)
            option.shards = distinct
        EmbeddingEnumerator.populate_estimates(shadow, options)

    vars(shadow).update(populate_estimates=populate, _last_stored_module=None)
    found = [_with_all_shards(option, *left_out[id(option)]) for option in shadow.enumerate(module, list(sharders))]
    known = ("_sharder_map", "_sharder_data_map", "_last_stored_module", "_last_stored_sharders")
    vars(enumerator).update({name: vars(shadow)[name] for name in known})
    vars(enumerator)["_last_stored_search_space"] = [each.option for each in found]
    return found


def priced_in_full(enumerator: Enumerator, options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Copies of options, all of whose shards the enumerator's estimators are asked for together."""
    copies = [copy.deepcopy(option) for option in options]
    if _by_shard_size(enumerator):
        cast("EmbeddingEnumerator", enumerator).populate_estimates(copies)
    return copies


def priced(option: ShardingOption) -> PricedOption:
    """An option's costs and bytes as arrays."""
    return PricedOption(option, *_figures(option.shards))


def _by_shard_size(enumerator: Enumerator) -> bool:
    """Whether the enumerator and its estimators are TorchRec's own, as this release has them."""
    known = (EmbeddingPerfEstimator, FacadePerfEstimator, EmbeddingStorageEstimator)
    estimators = vars(enumerator).get("_estimators", [])
    if type(enumerator) is not EmbeddingEnumerator or not all(type(estimator) in known for estimator in estimators):
        return False
    inner = [getattr(estimator, "_estimator", estimator) for estimator in estimators]
    configs = [config for config in (getattr(estimator, "config", None) for estimator in inner) if config is not None]
    patched = any(_is_patched(value) for value in (enumerator, *estimators, *inner, *configs))
    alone = all(type(config).post_process_perfs is HardwarePerfConfig.post_process_perfs for config in configs)
    return alone and not patched


def _is_patched(value: Any) -> bool:
    """Whether methods were replaced, on the object itself or on its class."""
    own = any(callable(getattr(type(value), name, None)) for name in vars(value))
    asked = (getattr(type(value), name, None) for name in ("enumerate", "populate_estimates", "estimate"))
    return own or any(method is not None and not method.__module__.startswith("torchrec.") for method in asked)


def _distinct(shards: Sequence[Shard]) -> tuple[list[Shard], npt.NDArray[np.int64]]:
    """One shard of each size, and for every shard its position among them."""
    known: dict[tuple[int, ...], int] = {}
    which = np.array([known.setdefault(tuple(shard.size), len(known)) for shard in shards], np.int64)
    firsts = np.unique(which, return_index=True)[1]
    return [shards[int(first)] for first in firsts], which


def _with_all_shards(option: ShardingOption, shards: list[Shard], which: npt.NDArray[np.int64]) -> PricedOption:
    """An option that was priced with one shard of each size."""
    perf, storage = _figures(option.shards)
    for shard, size in zip(shards, which.tolist(), strict=True):
        shard.perf, shard.storage = option.shards[size].perf, option.shards[size].storage
    option.shards = shards
    return PricedOption(option, perf[which], storage[:, which])


def _figures(shards: Sequence[Shard]) -> tuple[FloatArray, FloatArray]:
    """Costs, shape (shards,), and bytes, shape (3, shards)."""
    perf, storage = [shard.perf.total for shard in shards], [shard.storage for shard in shards]
    return np.array(perf, np.float64), np.array([[s.hbm, s.ddr, s.ssd] for s in storage], np.float64).reshape(-1, 3).T
