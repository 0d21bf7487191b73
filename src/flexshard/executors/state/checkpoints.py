"""Checkpoints of a whole training state, with torch.distributed.checkpoint: saved under one plan, loaded under any.

A checkpoint is a folder with one subfolder per save and a file ``latest`` that names the one to load. A save writes a
new subfolder, lists its files with their sizes, and only then replaces ``latest``; one that is killed changes nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.optim.keyed import CombinedOptimizer

from flexshard._internal import (
    DocumentFormat,
    PathLike,
    lost_rank,
    on_all_ranks,
    on_first_rank,
    read_json,
    write_json,
    write_text,
)
from flexshard.errors import CheckpointError, FlexShardError, OutputError
from flexshard.executors.state.fused_optimizer import FlexShardFusedOptimizer
from flexshard.executors.state.logical import LaterTable, tables_on_host
from flexshard.executors.state.served_shards import ServedLoadPlanner

__all__ = ["full_state_dict", "load_checkpoint", "save_checkpoint"]

FORMAT = DocumentFormat(
    "flexshard.checkpoint", 1, "a checkpoint's list of files", "checkpoints", CheckpointError, "load another checkpoint"
)
_LATEST, _FILES, _SAVE = "latest", "files.json", re.compile(r"save-[0-9]+")
# Of what torch says where a file cannot be read.
_OF_DAMAGE = ("Weights only load failed", "PytorchStreamReader", "invalid load key", "unpickling")


def save_checkpoint(
    path: PathLike,
    model: nn.Module,
    optimizer: Any = None,
    *,
    position: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model and its optimizer; every rank must call it.

    Tables are saved whole, by original id, with their optimizer state, so that another plan or number of ranks can load
    them.

    Args:
        path: folder that all ranks see; a checkpoint that is there is replaced once the new one is complete.
        model: such as TorchRec's ``DistributedModelParallel``.
        optimizer: such as its ``CombinedOptimizer``; by default the model's ``fused_optimizer``.
        position: where reading goes on, numbers and texts as of a reader's ``state_dict``: of the last batch that was
            trained, where a pipeline reads ahead. Rank 0's is kept.
        process_group: of the ranks that save; the default one if None.

    Raises:
        CheckpointError: rank 0's position is no mapping, or not of numbers and texts; on every rank.
        OutputError: it could not be written; the previous checkpoint is still there.
    """
    folder, rank = Path(path), dist.get_rank(process_group)

    def prepare() -> tuple[str | None, str]:
        _check_position(position)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before, saves = _known_save(folder), _saves(folder)
            for name in saves if before is not None else []:
                if name != before:  # of a save that was killed
                    shutil.rmtree(folder / name)
        except OSError as error:
            raise _unwritten(folder, _cause(error)) from error
        return before, f"save-{max(map(_number, saves), default=0) + 1}"

    before, name = on_first_rank(prepare, partial(_unwritten, folder), process_group)
    target = folder / name

    def publish() -> None:
        sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
        kinds = dict(_optimizers(getattr(model, "fused_optimizer", None)))
        write_json(target / _FILES, FORMAT.stamped({"files": sizes, "optimizers": kinds, "position": position}))
        write_text(folder / _LATEST, name + "\n")
        if before is not None:
            shutil.rmtree(folder / before, ignore_errors=True)

    def save() -> None:
        try:
            dcp.save(_state(model, optimizer), checkpoint_id=str(target), process_group=process_group)
            if rank == 0:
                publish()
        except (OSError, RuntimeError, dcp.api.CheckpointException):
            if rank == 0:
                shutil.rmtree(target, ignore_errors=True)
            raise

    _written(save, folder, process_group)


def _written(work: Callable[[], None], folder: Path, process_group: dist.ProcessGroup | None) -> None:
    """Do a part of a save; if it fails on any rank, every rank raises OutputError."""

    def told() -> None:
        try:
            work()
        except (OSError, RuntimeError, CheckpointError, dcp.api.CheckpointException) as error:
            # torch's own errors are of gloo's or NCCL's sockets where another rank has ended
            ended = isinstance(error, RuntimeError) and not isinstance(error, FlexShardError)
            raise _unwritten(folder, lost_rank(error) if ended else _cause(error)) from error

    def of_others(said: str) -> OutputError:
        return OutputError(said) if said.startswith("rank ") else _unwritten(folder, said)

    on_all_ranks(told, of_others, process_group)


def _unwritten(folder: Path, reason: str) -> OutputError:
    return OutputError(f"{folder}: the checkpoint could not be written; the previous one is untouched ({reason})")


def _check_position(position: object) -> None:
    """Whether a position is read again as it is written, but for tuples, which are lists then.

    Raises:
        CheckpointError: it is not.
    """
    if position is None:
        return
    wrong = f"found {position!r}"
    if isinstance(position, Mapping):
        try:
            plain = _plain(position)
            text = json.dumps(plain, allow_nan=False, ensure_ascii=False)
            if json.loads(text.encode()) == plain:
                return
            wrong = "keys are texts"
        except (TypeError, ValueError) as error:
            wrong = str(error)
    raise CheckpointError(f"position must be a dict of numbers and texts, lists and dicts of them: {wrong}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _cause(error: BaseException) -> str:
    """What went wrong, in a line; of an error that torch collected from all ranks, on the first that had one."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"rank {rank}: {_cause(error.failures[rank][0])}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def load_checkpoint(
    path: PathLike,
    model: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Load what :func:`save_checkpoint` saved, under whatever plan the model has now; every rank must call it.

    Args:
        path, model, optimizer: as for :func:`save_checkpoint`.
        strict: whether it is an error that the checkpoint has parameters that the model has not. What the model has
            must be in the checkpoint in any case.
        process_group: of the ranks that load; the default one if None.

    Returns:
        the position that was saved with it, None if there was none.

    Raises:
        CheckpointError: there is none, files of it are missing, cut off or cannot be read, or it is of another model,
            or of other optimizers of tables under a plan. Rows may be of the checkpoint in part by then: load another
            before training goes on.
    """
    folder = Path(path)

    def unloaded(reason: str) -> CheckpointError:
        return CheckpointError(f"{folder}: cannot be loaded: {reason}")

    name = on_first_rank(lambda: _latest(folder), unloaded, process_group)
    position = on_all_ranks(lambda: _checked(folder / name, model), CheckpointError, process_group)
    if optimizer is not None:
        optimizer.init_state()  # otherwise there would be nothing yet to load into
    state = _state(model, optimizer)
    planner = ServedLoadPlanner(whole="model" if strict else None)
    try:
        dcp.load(state, checkpoint_id=str(folder / name), process_group=process_group, planner=planner)
    except (dcp.api.CheckpointException, ValueError) as error:
        cause = _cause(error)
        if any(word in cause for word in _OF_DAMAGE):
            raise CheckpointError(f"{folder / name}: a file of it is damaged; load another checkpoint") from error
        raise CheckpointError(f"{folder / name}: cannot be loaded into this model: {cause}") from error
    model.load_state_dict(state["model"])
    (model.fused_optimizer if optimizer is None else optimizer).load_state_dict(state["optimizer"])
    return position


def full_state_dict(model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """The model's state with whole tables in order of id, on rank 0 (elsewhere empty); every rank must call it.

    ``torch.save`` writes it, and an unsharded model loads it. On their way tables pass the ranks' devices in parts.
    """
    weights = {}
    with tables_on_host(later=True):
        state = model.state_dict()
    for name, value in state.items():
        whole = _whole(value, process_group)
        if whole is not None and dist.get_rank(process_group) == 0:
            weights[name] = whole if isinstance(value, LaterTable) else whole.detach().to("cpu", copy=True)
    return weights


def _whole(value: Any, process_group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """A tensor of a ``state_dict``, whole; tables and TorchRec's own shards on rank 0 alone."""
    if isinstance(value, LaterTable):
        return value.whole()
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.local_shards()[0] if isinstance(full, LocalShardsWrapper) else full
    if not isinstance(value, ShardedTensor):
        return value
    first = dist.get_rank(process_group) == 0
    gathered = torch.empty(value.size(), dtype=value.dtype) if first else None
    value.gather(dst=0, out=gathered)
    return gathered


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    optimizer = model.fused_optimizer if optimizer is None else optimizer
    with tables_on_host():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _latest(folder: Path) -> str:
    """The save to load; raises CheckpointError where none is named."""
    file = folder / _LATEST
    try:
        name = file.read_text().strip()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no checkpoint is here; expected a file 'latest' that names one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: cannot be read as a checkpoint: {_cause(error)}") from error
    if not _SAVE.fullmatch(name):
        there = ", ".join(_saves(folder)) or "none"
        raise CheckpointError(f"{file}: names no save; write the name of the one to load into it (there: {there})")
    return name


def _known_save(folder: Path) -> str | None:
    """The save that a new one replaces; None where none is named, and so none can be said to be old."""
    try:
        return _latest(folder)
    except CheckpointError:
        return None


def _saves(folder: Path) -> list[str]:
    """Folders of saves, oldest first, whole or not."""
    return sorted((file.name for file in folder.iterdir() if _SAVE.fullmatch(file.name)), key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _optimizers(optimizer: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names of parameters of tables under a plan, and of their optimizers."""
    if isinstance(optimizer, CombinedOptimizer):
        for key, one in optimizer.optimizers:
            yield from _optimizers(one, f"{prefix}{key}." if key else prefix)
    elif isinstance(optimizer, FlexShardFusedOptimizer):
        yield from ((prefix + name, kind) for name, kind in optimizer.kinds.items())


def _checked(folder: Path, model: nn.Module) -> dict[str, Any] | None:
    """The position of a save that is whole, and of the model's optimizers: states of several are alike but for what
    they mean.
    """
    listing = folder / _FILES
    document = read_json(listing, FORMAT)
    sizes, position, kinds = document.get("files"), document.get("position"), document.get("optimizers", {})
    if not isinstance(sizes, dict):
        raise CheckpointError(f"{listing}: it lists no files; {FORMAT.remedy}")
    for name, size in sizes.items():
        file = folder / name
        actual_bytes = file.stat().st_size if file.exists() else None
        if actual_bytes != size:
            shown = "is missing" if actual_bytes is None else f"has {actual_bytes:,} bytes of {size:,}"
            raise CheckpointError(f"{file}: {shown}; the checkpoint is incomplete, load another one")
    if not isinstance(kinds, dict):
        raise CheckpointError(f"{listing}: its optimizers are no mapping; {FORMAT.remedy}")
    for name, kind in _optimizers(getattr(model, "fused_optimizer", None)):
        if kinds.get(name, kind) != kind:
            raise CheckpointError(
                f"{folder}: its optimizer of {name} is {kinds[name]}, the model's is {kind}; build the model with the"
                " former, or load weights alone with torch.distributed.checkpoint"
            )
    if not (position is None or isinstance(position, dict)):
        raise CheckpointError(f"{listing}: its position is no mapping; {FORMAT.remedy}")
    return position
