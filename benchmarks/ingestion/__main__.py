"""Reading against loops over pyarrow; the service against reading in the trainer's process, and against Ray Data.

python -m benchmarks.ingestion [--clicks globo_clicks.parquet] [--kills 200] [--without-ray] [reader rates ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.ingestion import reader, service, storage
from benchmarks.timing import machine

# The last keeps to one processor from then on.
PARTS = ("ledger", "rates", "stages", "trainer", "kills", "storage", "reader")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--clicks", type=Path, help="the clicks of Globo.com, as one file of Parquet")
    parser.add_argument("--kills", type=int, default=200, help="processes to kill")
    parser.add_argument("--samples", type=int, default=storage.ROWS, help="of the dataset with thousands of features")
    parser.add_argument("--without-ray", action="store_true", help="leave out Ray's actors and Ray Data")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = args.parts or PARTS
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "ledger" in parts:
            service.ledger()
        if "rates" in parts:
            service.rates(folder, with_ray=not args.without_ray)
        if "stages" in parts:
            service.stages(folder)
        if "trainer" in parts:
            service.trainer(folder)
        if "kills" in parts:
            service.kills(folder, args.kills)
        if "storage" in parts:
            storage.main(folder, args.samples)
        if "reader" in parts:
            reader.main(folder, args.clicks)


if __name__ == "__main__":
    main()
