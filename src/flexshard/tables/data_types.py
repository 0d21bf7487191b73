"""Data types of tables: one registry of their names here, in torch, in TorchRec and in FBGEMM. Names are texts, so that
planning needs none of these.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DATA_TYPES", "DTYPE_BYTES", "DataType", "data_type_of_torchrec"]


@dataclass(frozen=True)
class DataType:
    """A floating-point type of weights and activations.

    Attributes:
        name: here and in torch.
        nbytes: s, bytes per scalar.
        torchrec: member of TorchRec's ``DataType``; None where it has none.
        fbgemm: member of FBGEMM's ``SparseType``; None where it has none.
        dropped_bits: of a float32's fraction, that do not fit.
    """

    name: str
    nbytes: int
    torchrec: str | None = None
    fbgemm: str | None = None
    dropped_bits: int = 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes per scalar of gradients, which add up in float32 at least."""
        return max(self.nbytes, 4)


DATA_TYPES = {
    kind.name: kind
    for kind in (
        DataType("float64", 8),
        DataType("float32", 4, "FP32", "FP32"),
        DataType("float16", 2, "FP16", "FP16", dropped_bits=13),
        DataType("bfloat16", 2, "BF16", "BF16", dropped_bits=16),
    )
}

DTYPE_BYTES = {kind.name: kind.nbytes for kind in DATA_TYPES.values()}


def data_type_of_torchrec(name: str) -> DataType | None:
    """The data type that TorchRec calls by this name; None if tables cannot have it."""
    return next((kind for kind in DATA_TYPES.values() if kind.torchrec == name), None)
