"""An engine that does all that it does on a GPU, short of generating code for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from understudy.training import engine as module
from understudy.training.engine import Engine


class PlainlyCaptured(module._Captured):
    """Captured without a GPU: buffers as there, and a call in place of a replay."""

    def __init__(self, function: Any, args: Any) -> None:
        leaves, structure = module.pytree.tree_flatten(args)
        self._inputs = [module._laid_out(leaf).clone() for leaf in leaves]
        self._seen = [(None, 0)] * len(leaves)
        buffers = module.pytree.tree_unflatten(self._inputs, structure)
        self._results = function(*buffers)
        self._graph = SimpleNamespace(replay=lambda: self._again(function, buffers))

    def _again(self, function: Any, buffers: Any) -> None:
        fresh = module.pytree.tree_leaves(function(*buffers))
        for old, new in zip(module.pytree.tree_leaves(self._results), fresh, strict=True):
            old.copy_(new)


def static_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the engine; `compiled` lists its traces, `said` what it told the user."""
    compiled: list[Any] = []

    def compile_plainly(traced: Any, **_: Any) -> Any:
        compiled.append(traced)
        return traced

    monkeypatch.setattr(Engine, "is_static", property(lambda self: self.compile))
    monkeypatch.setattr(torch, "compile", compile_plainly)
    monkeypatch.setattr(module, "_Captured", PlainlyCaptured)
    said: list[str] = []
    engine: Any = Engine(say=said.append)
    engine.compiled, engine.said = compiled, said
    return engine
