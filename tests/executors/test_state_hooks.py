"""Hooks of state dicts, and how these are asked for, beside TorchRec's sharded module."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch

from tests.executors import models, ranks
from tests.executors.test_surface import SPLIT, ours, theirs, whole


def told(parallel: Any) -> list[Any]:
    """Which hooks are called by every way to save and load a module, and what the state dict is."""
    module, heard = parallel.module.wide, list[Any]()
    module.register_state_dict_pre_hook(lambda _, prefix, keep_vars: heard.append(("saving", prefix, keep_vars)))
    module.register_state_dict_post_hook(lambda _, state, prefix, __: heard.append(("saved", prefix, len(state))))
    module.register_load_state_dict_pre_hook(lambda _, __, prefix, *___: heard.append(("loading", prefix)))
    module.register_load_state_dict_post_hook(lambda _, keys: heard.append(("loaded", *map(list, keys))))
    for each in (module, parallel, parallel.module):
        each.load_state_dict(each.state_dict())
        heard.append(type(each).__name__ if each is parallel else "")
    state = module.state_dict()
    heard.append((isinstance(state, OrderedDict), state._metadata[""]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # positional arguments are on their way out
        into: Any = OrderedDict()
        same = module.state_dict(into, "q.")
        heard.append((same is into, sorted(into)))
    module.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}note": torch.zeros(1)}))
    heard.append(sorted(module.state_dict()))
    return heard


def both_told(rank: int) -> list[list[Any]]:
    return [told(shard("sgd")) for shard in (theirs, ours)]


def test_hooks_are_called_as_torchrec_calls_them() -> None:
    for expected, found in ranks.run(2, 2, both_told):
        assert found == expected
        assert {"saving", "saved", "loading", "loaded"} <= {event[0] for event in found if isinstance(event, tuple)}


def renamed(rank: int) -> list[bool]:
    """A checkpoint of a model whose tables had other names, through each way to load it."""
    parallel, found = ours("sgd"), []

    def migrate(_: Any, state: Any, prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}former.")]:
            state[prefix + "embeddings." + key.removeprefix(f"{prefix}former.")] = state.pop(key)

    parallel.module.wide.register_load_state_dict_pre_hook(migrate)
    for each in (parallel.module.wide, parallel, parallel.module):
        state = {name: whole(value) + 1 for name, value in each.state_dict().items()}
        each.load_state_dict({name.replace("wide.embeddings.", "wide.former."): value for name, value in state.items()})
        if each is parallel.module.wide:
            each.load_state_dict({name.replace("embeddings.", "former."): value for name, value in state.items()})
        found += [torch.equal(whole(value), state[name]) for name, value in each.state_dict().items()]
    return found


def test_keys_that_a_hook_renames() -> None:
    assert SPLIT.keys() >= models.WIDE.keys()
    for found in ranks.run(2, 2, renamed):
        assert found
        assert all(found)


def refused(rank: int) -> None:
    from flexshard.errors import CheckpointError

    module = ours("sgd").module.wide
    module.register_load_state_dict_pre_hook(lambda *a: a[-1].append("of another age"))
    with pytest.raises(CheckpointError, match="of another age"):
        module.load_state_dict(module.state_dict())
    module = ours("sgd").module.wide
    with pytest.raises(CheckpointError, match="the checkpoint has no embeddings"):
        module.load_state_dict({})
    module.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
    module.load_state_dict({})


def test_what_a_hook_refuses_and_forgives() -> None:
    ranks.run(2, 2, refused)
