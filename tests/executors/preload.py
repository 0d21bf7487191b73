"""Imported once, before ranks are forked off."""

import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torchrec  # noqa: E402
import torchrec.distributed  # noqa: E402, F401
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402, F401

import flexshard.executors.sharding.sharders  # noqa: E402
import flexshard.planner.torchrec.adaptor  # noqa: E402, F401

torch.set_num_threads(1)

import logging  # noqa: E402

logging.getLogger("torchrec").setLevel(logging.ERROR)
logging.getLogger("torch.fx").setLevel(logging.ERROR)
