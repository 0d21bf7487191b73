"""In which order a plain loop gives a batch to the modules of a model.

TorchRec's pipelines begin a batch for all modules before they wait for any. In a plain loop each forward pass waits for
its own part, so that five modules wait for five exchanges, though the first one's could have carried all of it: what
the others will be given is the same object. Where the last two batches went to the same modules in the same order, the
next one's is taken to do so, too, and is begun for all of them with the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["CallOrder", "Expected"]


@dataclass
class Expected:
    """A batch that was begun for modules which are expected to be given it.

    Attributes:
        batch: begun.
        given: what all of them are to be given.
        mode: under which.
        left: modules that were not given it yet.
        rows: of each, a mark of its rows as they were looked up; empty before that.
    """

    batch: Any
    given: KeyedJaggedTensor
    mode: Hashable
    left: set[int]
    rows: dict[int, Hashable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = _mark(self.given.values())

    @property
    def ids_changed(self) -> bool:
        """Whether somebody wrote to the batch's ids since."""
        return self._ids != _mark(self.given.values())


def _mark(values: torch.Tensor) -> tuple[int, int]:
    return id(values), values._version


class CallOrder:
    """Learns from calls alone, which are the same on every rank, so that all ranks expect the same.

    A run is what modules are given the same batch one by one, each once, under the same mode (gradients or none, the
    stream), with no update in between.

    Attributes:
        expected: what was begun for modules to come.
    """

    def __init__(self) -> None:
        self.expected: Expected | None = None
        self._run: list[int] = []
        self._given: weakref.ref[Any] | None = None
        self._mode: Hashable = None
        self._last: dict[tuple[int, Hashable], tuple[int, ...]] = {}
        self._usual: dict[tuple[int, Hashable], tuple[int, ...]] = {}

    def called(self, index: int, given: object, mode: Hashable) -> tuple[int, ...]:
        """A module is given a batch, by itself; which others are expected to get it after it, if it begins a run."""
        if not isinstance(given, KeyedJaggedTensor):  # others are converted for each module
            self.end()
            return ()
        same = self._given is not None and self._given() is given and mode == self._mode
        if same and self._run and index not in self._run:
            self._run.append(index)
            return ()
        self.end()
        self._run, self._given, self._mode = [index], weakref.ref(given), mode
        return self._usual.get((index, mode), ())[1:]

    def begun_for(self, index: int, given: object, mode: Hashable) -> Expected | None:
        """What a module is given if that was expected; if not, nothing is expected any more."""
        expected = self.expected
        if expected is None:
            return None
        if index not in expected.left or given is not expected.given or mode != expected.mode:
            self.expected = None
            return None
        self.called(index, given, mode)
        expected.left.remove(index)
        if not expected.left:
            self.expected = None
        return expected

    def end(self) -> None:
        """The run is over: what comes next begins another one."""
        self.expected = None
        if not self._run:
            return
        run, key = tuple(self._run), (self._run[0], self._mode)
        if self._last.get(key) == run:
            self._usual[key] = run
        else:
            self._usual.pop(key, None)
        self._last[key] = run
        self._run = []
