"""A file as Parquet's decoder sees it, read from storage in few large reads."""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

from flexshard._internal import on_this_machine
from flexshard.ingestion.storage.merged_reads import merged_reads

__all__ = ["MergedFile"]

_AT_ONCE = 16  # reads of remote storage


class MergedFile:
    """A file of which stretches are loaded before they are asked for; what was not loaded is read when it is.

    What is loaded is held until the next load, and by what was decoded from it. Arrow's own cache of merged reads holds
    all that was ever read of a file.
    """

    def __init__(self, path: str, filesystem: pafs.FileSystem | None) -> None:
        """Open the file; raises OSError."""
        self._is_local = on_this_machine(filesystem)
        self._file = (filesystem or pafs.LocalFileSystem()).open_input_file(path)
        self._size = int(self._file.size())
        self._place = 0
        self._starts: list[int] = []
        self._buffers: list[pa.Buffer] = []
        self.closed = False

    def load(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], gap: float) -> tuple[int, int]:
        """Read stretches, in place of those before; how many reads that took, and bytes.

        Raises:
            OSError: the file cannot be read, or ends before a stretch does.
        """
        self._starts, self._buffers = [], []
        firsts, lengths = merged_reads(starts, sizes, gap)
        wanted = list(zip(firsts.tolist(), lengths.tolist(), strict=True))
        if self._is_local or len(wanted) < 2:
            found = [self._read(first, length) for first, length in wanted]
        else:
            with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
                found = list(pool.map(lambda read: pa.py_buffer(self._file.read_at(read[1], read[0])), wanted))
        if any(buffer.size != length for buffer, (_, length) in zip(found, wanted, strict=True)):
            raise OSError("the file ends before its footer says")
        self._starts, self._buffers = firsts.tolist(), found
        return len(wanted), int(lengths.sum())

    def _read(self, first: int, length: int) -> pa.Buffer:
        self._file.seek(first)
        return self._file.read_buffer(length)

    # What Arrow asks of files.

    def read_buffer(self, size: int) -> pa.Buffer:
        """What stands next; without copying, where it was loaded."""
        first = self._place
        number = bisect_right(self._starts, first) - 1
        if number >= 0:
            skipped = first - self._starts[number]
            if skipped + size <= self._buffers[number].size:
                self._place += size
                return self._buffers[number].slice(skipped, size)
        found = self._read(first, size)
        self._place += found.size
        return found

    def read(self, size: int = -1) -> bytes:
        """What stands next, as bytes."""
        return bytes(self.read_buffer(self._size - self._place if size < 0 else size))

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go somewhere."""
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        """Where it is."""
        return self._place

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """No."""
        return False

    def close(self) -> None:
        """Let go of the file and of what was loaded."""
        self.closed = True
        self._starts, self._buffers = [], []
        self._file.close()

    def __enter__(self) -> MergedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
