"""Streams of a device: what one of them made and another uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["SideStream", "continued_on", "current_stream", "used_here"]


def used_here(tensor: torch.Tensor) -> None:
    """Let nobody have a tensor's memory before the current stream has used it, whichever stream made it."""
    if tensor.device.type == "cuda":
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Of a CUDA device; None of others."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(device)


@contextmanager
def continued_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Go on where :func:`current_stream` was: that stream waits for the present one first, and this for that then."""
    if stream is None:
        yield
        return
    import torch

    now = torch.cuda.current_stream(stream.device)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        yield
    now.wait_stream(stream)


class SideStream:
    """A stream of its own for what is done beside the steps; on CPUs there is none, and nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            import torch

            self._stream = torch.cuda.Stream(device)

    def inside(self) -> AbstractContextManager[Any]:
        """What is done there, on whichever thread."""
        if self._stream is None:
            return nullcontext()
        import torch

        there: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return there

    def moment(self) -> torch.cuda.Event | None:
        """When the current stream will have done what it was given."""
        if self._stream is None:
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def wait_here(self, moment: torch.cuda.Event | None) -> None:
        """Let the current stream go on after it."""
        if moment is not None and self._stream is not None:
            import torch

            torch.cuda.current_stream(self._stream.device).wait_event(moment)
