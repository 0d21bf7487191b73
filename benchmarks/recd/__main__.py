"""Storage, reader, conversion and training of deduplicated batches, each against its baseline in the same run.

python -m benchmarks.recd                  # all; or: storage reader conversion training histories order
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.recd import conversion, histories, order, reader, storage, training
from benchmarks.timing import machine

PARTS = {
    "storage": storage.main,
    "reader": reader.main,
    "conversion": conversion.main,
    "training": training.main,
    "histories": histories.main,
    "order": order.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    print(machine())
    for part in args.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder))


if __name__ == "__main__":
    main()
