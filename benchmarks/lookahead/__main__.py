"""Where a lookahead cache should be, what deciding costs, what steps cost with one, and plans that have them.

python -m benchmarks.lookahead [--clicks globo_clicks.parquet] [--lookups ecommerce_orm_busy.parquet] [placements ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lookahead import cached_step, forms, host_operations, oracle, placements, planning
from benchmarks.timing import machine

PARTS = ("placements", "forms", "oracle", "step", "plans", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--clicks", type=Path, help="the clicks of Globo.com, as one file of Parquet")
    parser.add_argument("--lookups", type=Path, help="the lookups of an e-commerce application, as one file of Parquet")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = args.parts or PARTS
    print(machine())
    if "placements" in parts:
        placements.main(args.clicks, args.lookups)
    if "forms" in parts:
        forms.main(args.clicks, args.lookups)
    if "oracle" in parts:
        oracle.main()
    if "step" in parts:
        cached_step.main()
    if "plans" in parts:
        planning.main()
    if "host" in parts:
        host_operations.main()


if __name__ == "__main__":
    main()
