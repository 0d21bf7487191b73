"""Scripts in processes forked from one that has imported torch and TorchRec, which take seconds to import."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.executors.ranks import context


def run_script(
    script: Path, *options: str, folder: Path, ranks: int = 1, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """As ``python -W ignore script options`` in a folder; with several ranks, as ``torchrun --standalone`` starts them:
    then the largest return code, and what they wrote one after the other.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as outputs:
        free.bind(("127.0.0.1", 0))
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "forked"}
        processes = []
        for rank in range(ranks):
            own = launched | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            arguments = (str(script), options, str(folder), own, outputs, rank)
            processes.append(context.Process(target=_run, args=arguments))
        free.close()
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode or 0 for process in processes]
        out, err = (
            "".join(Path(outputs, f"{rank}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err")
        )
    return subprocess.CompletedProcess([str(script), *options], max(codes, key=abs), out, err)


def _run(
    script: str, options: Sequence[str], folder: str, environment: dict[str, str], outputs: str, rank: int
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(outputs, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    warnings.simplefilter("ignore")
    runpy.run_path(script, run_name="__main__")
