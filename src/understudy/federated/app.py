"""The server as a Flower app: `flwr run` starts it beside a SuperLink."""

from __future__ import annotations

import os
import threading
import time
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from understudy.errors import InvalidSettings
from understudy.federated.server import FederatedCritics
from understudy.files import make_directory, write_json
from understudy.progress import Progress

SECONDS_TO_END = 5
STATEMENT, FAILED = "federated.json", "failed.json"
APP = """[project]
name = "understudy-federation"
version = "1.0.0"
description = "The server of a federation: critics stay with their owners"
license = "MIT"

[tool.flwr.app]
publisher = "understudy"

[tool.flwr.app.components]
serverapp = "understudy_server:server"
clientapp = "understudy_server:client"

[tool.flwr.app.config]
"""
"""What Flower wants to know of an app; `main` reads what follows."""
MODULE = """from understudy.federated import app

server = app.server
client = app.client
"""


def named(reference: str) -> Any:
    """Return what `MODULE:NAME` names on this machine."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise InvalidSettings(f"'{reference}' was given, expected MODULE:NAME")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidSettings(f"'{reference}' cannot be loaded ({error}); check it") from error


class Lines(Progress):
    """Print what there is to say: Flower keeps it with its own log."""

    def say(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True)


def main(grid: Any, context: Any) -> None:
    """Train with clients' critics; leave what that cost them in OUT/federated.json."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    settings = context.run_config
    out = Path(str(settings["out"]))
    make_directory(out)
    try:
        critics = _train(grid, settings, out)
    except Exception as error:
        write_json(out / FAILED, {"message": str(error)})
        raise
    write_json(out / STATEMENT, critics.statement())


def _end_with(parent: int) -> None:
    """End when Flower has: an app that is left alone would try to reach its SuperLink for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


def _train(grid: Any, settings: Any, out: Path) -> FederatedCritics:
    critics = FederatedCritics(
        grid,
        clients=int(settings["clients"]),
        asked=int(settings["asked"]) or None,
        patience=float(settings["patience"]),
        most_steps=int(settings["most_steps"]),
        progress=Lines(),
    )
    given = tomllib.loads(str(settings["settings"]))
    named(str(settings["train"]))(critics, out, **given)
    return critics


server = ServerApp()
server.main()(main)
client = ClientApp()  # empty: clients run a program of their own (`understudy federated client`)
