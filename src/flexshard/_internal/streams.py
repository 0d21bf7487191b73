"""Streams of a device: what one of them made and another uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["continued_on", "current_stream", "used_here"]


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
