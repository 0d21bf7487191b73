"""Deduplicated batches as files: NumPy archives, without pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import DocumentFormat, PathLike, replacing
from flexshard.embeddings.dedup.group import DedupedGroup
from flexshard.embeddings.dedup.inverse import InverseKeyedJaggedTensor
from flexshard.embeddings.dedup.runs import Runs
from flexshard.errors import DataError

__all__ = ["load_batch", "save_batch"]

FORMAT = DocumentFormat("flexshard.ikjt", 2, "a saved batch", "saved batches", DataError, "save it again", (1,))


def save_batch(batch: InverseKeyedJaggedTensor, path: PathLike) -> None:
    """See :meth:`InverseKeyedJaggedTensor.save`."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    parts = []
    for number, (jagged, group) in enumerate(batch.parts()):
        runs = None if group is None else group.runs
        tensors = {"values": jagged.values(), "lengths": jagged.lengths(), "weights": jagged.weights_or_none()}
        tensors |= {"inverse": None if group is None else group.inverse}
        tensors |= {} if runs is None else {"run_starts": runs.starts, "run_lengths": runs.lengths}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in kept.items()}
        parts.append({"keys": list(jagged.keys()), "stride": jagged.stride(), "dtypes": dtypes})
        parts[-1] |= {} if runs is None else {"newest": runs.newest, "max_shift": runs.max_shift}
        arrays |= {f"{number}.{name}": _as_numpy(tensor) for name, tensor in kept.items()}
    is_exact = all(group.runs is None for group in batch.groups)
    about = FORMAT.stamped({"keys": batch.keys(), "parts": parts}, version=1 if is_exact else None)
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **cast("Any", arrays))


def load_batch(path: PathLike) -> InverseKeyedJaggedTensor:
    """See :meth:`InverseKeyedJaggedTensor.load`."""
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            about = FORMAT.body_of(json.loads(file["about"].tobytes()), str(path))
            groups, plain = [], None
            for number, part in enumerate(about["parts"]):
                tensors = {name: _as_tensor(file[f"{number}.{name}"], dtype) for name, dtype in part["dtypes"].items()}
                inverse = tensors.pop("inverse", None)
                starts, lengths = tensors.pop("run_starts", None), tensors.pop("run_lengths", None)
                runs = None
                if starts is not None and lengths is not None:
                    how = {"newest": part["newest"], "max_shift": part["max_shift"]}
                    begins, sizes = starts.numpy(), lengths.numpy()
                    runs = Runs.of(begins, sizes, **how)
                    size = tensors["values"].numel() // len(part["keys"])
                    if begins.min(initial=0) < 0 or (begins + sizes).max(initial=0) > size:
                        raise ValueError(f"runs leave their buffer of {size} values")
                jagged = KeyedJaggedTensor(keys=part["keys"], stride=part["stride"], **tensors)
                if inverse is None:
                    plain = jagged
                else:
                    groups.append(DedupedGroup(jagged, inverse, runs=runs))
            return InverseKeyedJaggedTensor(groups, plain, about["keys"])
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # a damaged archive raises many kinds
        raise DataError(f"{path}: not a saved batch, or damaged: {error}") from error


def _as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    kept = tensor.detach().cpu().contiguous()
    return cast("npt.NDArray[Any]", (kept.view(torch.int16) if kept.dtype == torch.bfloat16 else kept).numpy())


def _as_tensor(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
