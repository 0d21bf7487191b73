"""Counting calls for which a CUDA device makes the host wait, on CPUs: numbers read from tensors, results whose size
depends on numbers, copies from memory that is not pinned.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_COPY = "copy of numbers that Python or NumPy have"
_READS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
    aten.lift_fresh.default: _COPY,
    aten.lift_fresh_copy.default: _COPY,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def _within(name: str) -> bool:
    """Whether a function is being called."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _waits(_device: torch.device) -> bool:
    return True


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Code that avoids waits does so on CPUs, too."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("flexshard.") and "host_waits_for" in vars(module):
                patches.enter_context(mock.patch.object(module, "host_waits_for", _waits))
        yield


class HostWaits(TorchDispatchMode):
    """Counts them by name while it is open.

    What FBGEMM does inside of an operator is not seen, nor are tensors that ``on_host`` names: they are on the host
    whatever the device.
    """

    def __init__(self, on_host: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._on_host = {tensor.data_ptr() for tensor in on_host}
        self._patches: list[Any] = []

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()

    def __enter__(self) -> HostWaits:
        for name in ("tolist", "numpy", "cpu"):
            self._patch(torch.Tensor, name)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in reversed(self._patches):
            patch.stop()

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            here = self._known(args[0])
            if not here:
                self.counts[name] += 1
            result = original(*args, **kwargs)
            if name == "cpu" and not here:
                result = result.detach().view(result.shape)
                result.on_host = True
            return result

        patch = mock.patch.object(owner, name, call)
        patch.start()
        self._patches.append(patch)

    def _known(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor, "on_host", False) or tensor.data_ptr() in self._on_host

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            pinned = _READS[func] == _COPY and _within("to_device")
            if not pinned and not self._known(args[0]):
                self.counts[_READS[func]] += 1
        elif func in _INDEXED:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                self.counts["boolean mask"] += 1
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.counts["repeat_interleave"] += 1
        elif func is aten.segment_reduce.default and not kwargs.get("unsafe", False):
            self.counts["segment_reduce"] += 1
        return func(*args, **kwargs)
