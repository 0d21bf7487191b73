"""What went wrong in an example, in one line."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa

from flexshard.errors import FlexShardError

__all__ = ["above_0", "check_launched", "run_example"]


def above_0(text: str) -> int:
    """A whole number of at least 1, for ``argparse``."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {number}")
    return number


def check_launched(parser: argparse.ArgumentParser, ranks: int) -> None:
    """End where ``torchrun`` has not started this process."""
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        parser.error(f"start it with torchrun, such as: torchrun --nproc-per-node {ranks} examples/{parser.prog}")


def run_example(main: Callable[[], None]) -> None:
    """Run an example; bad input, and files that are not there, are one line on standard error and exit code 2."""
    try:
        main()
    except (FlexShardError, OSError, pa.ArrowException, duckdb.Error) as error:
        missing = "no such file: " if isinstance(error, FileNotFoundError) and error.errno is None else ""
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {missing}{' '.join(str(error).split())}\n")
        sys.exit(2)
    finally:
        gc.collect()  # gloo's threads end with their group, which models hold in cycles; later they may abort it all
