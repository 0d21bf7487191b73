"""Public names of a room, imported when they are first used; methods of values whose bodies stand in other files."""

from __future__ import annotations

import importlib
import sys
import warnings

from flexshard.errors import MissingDependencyError

TYPE_CHECKING = False  # as typing's, whose import takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    Exports = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]

__all__ = ["INSTALL_TORCHREC", "bound", "lazy_exports"]

# TorchRec's metadata asks for FBGEMM's CUDA build whatever the machine.
INSTALL_TORCHREC = (
    "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions psutil"
    " && pip install --no-deps torchrec==1.8.0"
)

# What only those who run a plan on a model have installed.
_RUNTIME = {"torch", "torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "pyre_extensions"}


def lazy_exports(
    package: str,
    modules: Mapping[str, Iterable[str]],
    *,
    deprecated: Mapping[str, str] | None = None,
    submodules: Iterable[str] = (),
) -> Exports:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a room's ``__init__`` (PEP 562).

    Args:
        package: its full name.
        modules: the names that each module gives; modules by their path in the room, or in full ("flexshard. ...").
        submodules: that are attributes without being imported first.
        deprecated: "module:name" (or "package:name") that an old name stands for now, for one more release.

    The ``__getattr__`` raises MissingDependencyError for a name that needs TorchRec or torch where that is not there.
    """
    homes = {name: module for module, names in modules.items() for name in names}
    moved, rooms = dict(deprecated or {}), set(submodules)

    def get(name: str) -> Any:
        if name in homes:
            value = _load(package, homes[name], name, name)
            setattr(sys.modules[package], name, value)  # found at once from now on
            return value
        if name in moved:
            module, _, new = moved[name].partition(":")
            full = _full(package, module)
            warnings.warn(
                f"{package}.{name} is {full}.{new} now; the old name goes with the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            return _load(package, module, new, name)
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted([*homes, "__doc__", "__name__", "__path__"]), sorted(homes)


def _full(package: str, module: str) -> str:
    return module if module.split(".")[0] == "flexshard" else f"{package}.{module}"


def _load(package: str, module: str, name: str, shown: str) -> Any:
    try:
        return getattr(importlib.import_module(_full(package, module)), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _RUNTIME:
            raise
        raise MissingDependencyError(f"{shown} needs TorchRec ({error}); {INSTALL_TORCHREC}") from error


def bound(room: str, method: str) -> Callable[..., Any]:
    """The function that a room's ``__init__`` names in its table ``VALUE_METHODS`` for a value's method.

    A value so offers ``save``, ``load`` or ``print`` without knowing the files that read, write and print it, which all
    know the value.

    Args:
        room: full name of its package.
        method: such as "Plan.save".
    """
    module, _, function = importlib.import_module(room).VALUE_METHODS[method].partition(":")
    bound_function: Callable[..., Any] = getattr(importlib.import_module(f"{room}.{module}"), function)
    return bound_function
