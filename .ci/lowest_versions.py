"""Print a pip constraint for every dependency that holds it at its lower bound, as pyproject.toml has it.

python .ci/lowest_versions.py [EXTRA ...] > constraints.txt
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = [line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]]
for requirement in [*project["dependencies"], *extras]:
    found = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    if found is not None:
        print("{}=={}".format(*found.groups()))
    elif not requirement.startswith("flexshard"):
        sys.exit(f"{requirement!r} has no lower bound")
