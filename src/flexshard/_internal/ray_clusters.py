"""Connecting to a Ray cluster."""

from __future__ import annotations

import os
import socket
from contextlib import closing

__all__ = ["connect_to_ray"]

_ANSWER_SECONDS = 10.0


def connect_to_ray(address: str | None = None) -> None:
    """Connect this process, if it is not yet, to the cluster at an address, as ``ray.init`` does: by default that of
    ``RAY_ADDRESS``, one that runs on this machine, or a new one.

    Raises:
        ConnectionError: there is none; Ray itself goes on trying an address where nobody answers.
        ValueError: an address that Ray cannot read.
    """
    import ray

    if ray.is_initialized():
        return
    host, colon, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            with closing(socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS)):
                pass
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConnectionError(f"nobody answers at {host}:{port} ({error})") from error
    ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
