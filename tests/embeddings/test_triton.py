"""The kernels for CUDA: compiled for GPUs that are not here, down to machine code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("fbgemm_gpu")

from tests.slow import first

SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from flexshard.embeddings.tensor_train import triton_kernels as kernels
from flexshard.executors.stores import update_kernels

FLOATS = "left weight out upstream gradient state prefixes core rows to_prefixes values".split()
WHOLE = "index tile_group tile_first ends starts parent digit row_index order".split()
TYPES = {name: "*fp32" for name in FLOATS} | {name: "*i64" for name in WHOLE} | {"rate": "fp32", "eps": "fp32"}
TABLE = {"Q": 16, "q": 4, "BQ": 16, "Bq": 4, "BK": 32}
CASES = [
    (kernels.grouped_mm, {"H": 4, "ITEMS": 16, "BM": 64, "BK": 32, "BC": 64}, "INDEXED", (False, True)),
    (kernels.grouped_outer, {"H": 4, "BM": 32, "BK": 32, "BC": 64}, "MODE", (0, 1, 2)),
    (kernels.suffix_forward, TABLE, None, (None,)),
    (kernels.suffix_to_prefixes, TABLE, None, (None,)),
    (kernels.suffix_to_core, TABLE, "MODE", (0, 1, 2)),
    (kernels.segment_sum, {"BLOCK": 256}, "MODE", (0, 1, 2)),
    (kernels.rowwise_adagrad, {"BLOCK": 1024}, None, (None,)),
]
for kernel, sizes, name, values in CASES:
    for value in values:
        known = sizes if name is None else sizes | {name: value}
        signature = {own: "constexpr" if own in known else TYPES.get(own, "i32") for own in kernel.arg_names}
        constants = {(kernel.arg_names.index(own),): value for own, value in known.items()}
        found = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert len(found.asm["cubin"]) > 1000
        assert ".local" not in found.asm["ptx"], "numbers spill to memory"
kernel = update_kernels._step
POINTERS = {"weight": "*fp16", "gradient": "*fp32", "first_state": "*fp32", "second_state": "*fp32", "slots": "*i64"}
POINTERS |= {"read": "*fp32", "by_gradient": "i32", "by_read": "i32", "dim": "i32"}
for kind in sorted(update_kernels.KINDS.values()):
    for flag in (False, True):
        known = {"KIND": kind, "L2": flag, "DECAYS": True, "INDEXED": flag, "SOME": flag, "BLOCK": 128}
        signature = {own: "constexpr" if own in known else POINTERS.get(own, "fp32") for own in kernel.arg_names}
        constants = {(kernel.arg_names.index(own),): value for own, value in known.items()}
        found = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert len(found.asm["cubin"]) > 1000
print("compiled")
"""


@pytest.mark.parametrize("capability", first(1, [90, 80]))
def test_kernels_compile_for_gpus(capability: int, tmp_path: os.PathLike[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-c", SCRIPT, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr
