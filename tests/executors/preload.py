"""Imported once, before ranks are forked off."""

import contextlib
import importlib
import warnings

warnings.simplefilter("ignore")

import numba  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
import torchrec.distributed  # noqa: E402, F401
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402, F401

import flexshard.executors.sharding.sharders  # noqa: E402
import flexshard.planner.torchrec.adaptor  # noqa: E402, F401

# What some ranks import later, which takes each of them up to a second.
for name in ("pandas", "pydantic", "pytest", "ray", "torch.distributed.checkpoint"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# The first compiled loop of a process loads most of numba.
numba.njit(lambda: 0)()

torch.set_num_threads(1)

import logging  # noqa: E402

logging.getLogger("torchrec").setLevel(logging.ERROR)
logging.getLogger("torch.fx").setLevel(logging.ERROR)
