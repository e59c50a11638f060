"""The server as a Flower app: `flwr run` starts it beside a SuperLink."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from understudy.errors import InvalidSettings
from understudy.federated.server import FederatedCritics
from understudy.files import make_directory, write_json
from understudy.progress import Progress

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
train = ""
out = ""
clients = 0
asked = 0
patience = 60.0
"""
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
    settings = context.run_config
    out = Path(str(settings["out"]))
    make_directory(out)
    try:
        critics = _train(grid, settings, out)
    except Exception as error:
        write_json(out / FAILED, {"message": str(error)})
        raise
    write_json(out / STATEMENT, critics.statement())


def _train(grid: Any, settings: Any, out: Path) -> FederatedCritics:
    critics = FederatedCritics(
        grid,
        clients=int(settings["clients"]),
        asked=int(settings["asked"]) or None,
        patience=float(settings["patience"]),
        progress=Lines(),
    )
    named(str(settings["train"]))(critics, out)
    return critics


server = ServerApp()
server.main()(main)
client = ClientApp()  # empty: clients run a program of their own (`understudy federated client`)
