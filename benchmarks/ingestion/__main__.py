"""Reading against loops over pyarrow.

python -m benchmarks.ingestion [--clicks globo_clicks.parquet]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.ingestion import reader
from benchmarks.timing import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clicks", type=Path, help="the clicks of Globo.com, as one file of Parquet")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        reader.main(Path(folder), args.clicks)


if __name__ == "__main__":
    main()
