"""Files that a command is about to write: none that it reads, and none of another kind unless somebody says so."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner, plots
from flexshard._internal import files_below, hidden_part
from flexshard.errors import OutputError

__all__ = ["Force", "check_folder", "check_output", "check_place", "kind_of"]

Force = Annotated[bool, typer.Option("--force", help="Replace an existing file of another kind.")]

_DATA = re.compile(r"\.(parquet|pq|(csv|tsv|json|jsonl|ndjson)(\.(gz|zst))?)$")
_PAGE = b"<!doctype html>"
_PARQUET, _PICTURES = b"PAR1", (b"\x89PNG", b"%PDF", b"<?xml", b"<svg")
_TEXT_FORMAT = re.compile(rb"[\"']?format[\"']?\s*:\s*[\"']?(flexshard\.\w+)")
# What commands call what they write, by what it says it is.
_NOUNS = {
    "flexshard.cluster": "a cluster file",
    "flexshard.compression": "a decision on compression",
    "flexshard.ingested": "a run of an ingestion job",
    "flexshard.ingestion": "an ingestion job",
    "flexshard.job": "a job",
    "flexshard.mapping": "a mapping",
    "flexshard.observed": "an observation",
    "flexshard.plan": "a plan",
    "flexshard.profile": "a profile",
    "flexshard.rates": "a file of rates",
    "flexshard.timeline": "a trace",
    "page": "a page",
    "torchrec": "a plan of TorchRec",
    "torcheasyrec": "a plan of TorchEasyRec",
    "parquet": "a Parquet file of data",
    "picture": "a picture",
}


def check_output(path: Path, kind: str, *, inputs: Iterable[Path | str] = (), force: bool = False) -> None:
    """Whether a command may write a file.

    Args:
        path: of the file.
        kind: what it will be: a format of FlexShard's files, "parquet" (data), "picture", "page", or whose plan.
        inputs: what the command reads; of a job also the files that it names.
        force: whether an existing file of another kind may be replaced.

    Raises:
        OutputError: it is one of the inputs, exists and is of another kind, or has a name that it cannot have.
    """
    _check_path(path, "file")
    path = _at_home(path)
    try:
        there = path.is_file() and path.stat().st_size > 0
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another path with -o") from error
    for given in _all_of(inputs) if there else ():
        if "://" not in str(given) and _reads(Path(given), path):
            raise OutputError(f"{path} is what this command reads, and would be lost; choose another path with -o")
    if kind == "picture" and path.suffix.lower() not in plots.PICTURE_SUFFIXES:
        raise OutputError(f"cannot draw {path}: the name of a picture ends in {', '.join(plots.PICTURE_SUFFIXES)}")
    if not there:
        return
    found = kind_of(path)
    if found != kind and not force:
        what = _NOUNS.get(found, "another file")
        raise OutputError(
            f"{path} exists and is {what}, not {_NOUNS[kind]}; choose another path with -o, or replace it with --force"
        )


def _reads(given: Path, path: Path) -> bool:
    """Whether an existing file is one that a file, a folder of data or a glob names."""
    given = _at_home(given)
    if given.is_dir():
        return any(_DATA.search(file.name) and path.samefile(file) for file in files_below(given))
    if given.exists():
        return path.samefile(given)
    return any(Path(match).exists() and path.samefile(match) for match in glob.glob(str(given), recursive=True))


def _all_of(inputs: Iterable[Path | str]) -> Iterator[Path | str]:
    """With what jobs among them name."""
    for given in inputs:
        yield given
        if "://" not in str(given) and Path(given).is_file() and kind_of(Path(given)) == "flexshard.job":
            yield from planner.job_files(given)


def check_folder(path: Path | None, inputs: Iterable[Path | str] = ()) -> None:
    """Whether a command may write a folder of this name; raises OutputError.

    Args:
        path: of the folder.
        inputs: folders of data among these may not have it inside, where whoever reads them would read it, too.
    """
    if path is None:
        return
    _check_path(path, "folder")
    place = _at_home(path).resolve()
    for given in inputs:
        folder = None if "://" in str(given) or not str(given) else _at_home(Path(given))
        if folder is None or not folder.is_dir() or folder.resolve() not in place.parents:
            continue
        if hidden_part(place.relative_to(folder.resolve()).as_posix()) is None:
            raise OutputError(
                f"{path} lies in {given}, with which it would be read from now on; choose another path with -o"
            )


def check_place(path: Path) -> None:
    """Whether a file's folder is there, which is to be known before minutes of work; raises OutputError."""
    if not _at_home(path).absolute().parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no such folder; choose another path with -o")


def _at_home(path: Path) -> Path:
    """With ``~`` as whose home it is; as it is where nobody's."""
    with suppress(RuntimeError):
        return path.expanduser()
    return path


def _check_path(path: Path, what: str) -> None:
    if what == "file" and not path.name:
        raise OutputError(f"-o takes the path of a file, found {str(path)!r}")
    if str(path) == "-":
        raise OutputError(f"-o takes the path of a {what}, found '-'; --json prints for other programs")


def kind_of(path: Path) -> str:
    """What a file is: as ``check_output`` has it, or "" if it is nothing known."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 12)
    except OSError as error:
        raise OutputError(
            f"cannot read what stands at {path}: {error.strerror}; choose another path with -o"
        ) from error
    if head.startswith(_PARQUET):
        return _parquet_kind(path)
    if head.startswith(_PICTURES):
        return "picture"
    if head.startswith(_PAGE):
        return "page"
    if head.startswith(b"PK") and b"torchrec.distributed.types" in head:
        return "torchrec"
    if head.startswith(b"{") and b'"sharding_type"' in head and b'"format"' not in head:
        return "torcheasyrec"
    named = _TEXT_FORMAT.search(head)
    return named.group(1).decode() if named else ""


def _parquet_kind(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return ""  # what is left of one
    named = re.search(rb'"format"\s*:\s*"(flexshard\.\w+)"', metadata.get(b"flexshard", b""))
    return named.group(1).decode() if named else "parquet"
