"""Entry point of `understudy`. Imports nothing heavy: commands are loaded when used."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Toml

from understudy import __version__
from understudy.errors import InvalidSettings, UnderstudyError
from understudy.files import REMEDIES, error_on
from understudy.text import one_line

HELP = """Make a synthetic stand-in for a private labelled image set, with a certified
differential-privacy guarantee.

Start with: understudy generate digits --epsilon 10
"""

COMMANDS = {
    "generate": "Make a synthetic set from private data.",
    "train-classifier": "Train a classifier on private data.",
    "evaluate": "Test classifiers trained on a set, or a released one; quality; memorisation.",
    "audit": "Attack the releases, the methods or a run; bound epsilon from below.",
    "report": "Write one HTML page about a run, or about several side by side.",
    "runs": "List the runs in a folder, finished and unfinished.",
    "plan": "Show noise, releases and cost of a run before spending anything.",
    "export": "Write a released set as PNG folders, parquet, npz, safetensors or IDX.",
    "sample": "Draw more images from the generator of a finished run.",
    "verify": "Check what was released against its certificate.",
    "register": "Enter a data set into the ledger, with its unit, budget and hold-out.",
    "ledger": "Show what was spent on each data set; check, back up and restore the ledger.",
    "fetch": "Get a known public data set, such as mnist, or weights of a public network.",
    "pretrain": "Train an encoder on public images, for methods that use one.",
    "pretrain-gan": "Train a GAN on public images, for dp-gan to start from.",
    "continual": "Learn in stages of different parties, handing on released sets alone.",
    "reproduce": "Make a paper's table again, measured beside published.",
    "federated": "Train with images that stay with their owners, over Flower.",
    "methods": "List the methods, or the settings of one.",
}
SWITCHED = {"true", "false", "yes", "no", "on", "off"}
"""What people pass after a switch."""
INTERRUPTED = {
    "generate": "see --resume",
    "train-classifier": "see --resume",
    "evaluate": "see --missing",
    "audit": "nothing was charged",
    "continual": "the same command goes on",
    "reproduce": "the same command goes on",
}
"""How to go on where a command was stopped at once; others have written nothing."""
WITH_METHOD_SETTINGS = ("generate", "train-classifier", "plan", "continual")
ALLOCATION = "can't allocate memory"
NO_MEMORY = "there is not enough memory for this; ask for fewer or smaller images, or free some"
FLAGS = ("--help", "-h", "--version")
"""What may stand in place of a command."""
MOST_NESTED = 8
"""Tables within tables of a configuration file: more than any setting needs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # Images are refused by a limit of our own, lower than the one this would warn about.
    warnings.filterwarnings("ignore", message=".*decompression bomb.*")
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _terminated_like_interrupted():
            build_app(tokens)(tokens, exit_on_error=False, print_error=False)
    except (UnderstudyError, CycloptsError) as error:
        sys.exit(_report(tokens, error))
    except KeyboardInterrupt as stopped:
        goes_on = INTERRUPTED.get(tokens[0] if tokens else "", "nothing was written")
        code = 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
        sys.exit(_report(tokens, UnderstudyError(f"stopped at once; {goes_on}"), code))
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in REMEDIES:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(_report(tokens, error_on(error.filename or "a file", error)))
    except Exception as error:
        if _is_out_of_memory(error):
            sys.exit(_report(tokens, UnderstudyError(NO_MEMORY)))
        traceback.print_exc()
        sys.exit(1)


def _is_out_of_memory(error: Exception) -> bool:
    """Say whether an allocation failed; PyTorch has no type of its own for that on a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or ALLOCATION in str(error)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM, too, clean up behind a command that does not wait for a good moment itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def build_app(tokens: Sequence[str]) -> App:
    """Build the parser; flags of `WITH_METHOD_SETTINGS` depend on `--method` in `tokens`."""
    command = tokens[0] if tokens else ""
    if command not in ("", *COMMANDS, *FLAGS):
        from understudy.data.catalogue import suggestion

        raise InvalidSettings(
            f"there is no command '{command}'{suggestion(command, COMMANDS)}; `understudy --help` "
            "lists them"
        )
    config = _option(tokens, "--config")
    if config and not os.path.isfile(config):
        raise InvalidSettings(f"there is no configuration file {config}; check the path")
    tables = [_configured(config)] if config else []
    for _ in range(MOST_NESTED):
        tables = [t for table in tables for t in table.values() if isinstance(t, dict)]
    if tables:
        raise InvalidSettings(f"{config} nests tables too deeply; expected settings by name")
    app = App(
        name="understudy",
        help=HELP,
        version=__version__,
        suppress_keyboard_interrupt=False,  # we say how to go on
        config=Toml(config, must_exist=True, use_commands_as_keys=False) if config else None,
    )
    for name, explain in COMMANDS.items():
        home = f"understudy.cli.{name.replace('-', '_')}"
        if name == command and name in WITH_METHOD_SETTINGS:
            module = importlib.import_module(home)
            built = module.build(_method(tokens) or module.DEFAULT_METHOD)
            app.command(built, **({} if isinstance(built, App) else {"name": name}))
        else:
            # The line is for the list of commands: the help of one is all that its docstring says.
            app.command(f"{home}:command", name=name, help=None if name == command else explain)
    return app


def _option(tokens: Sequence[str], name: str) -> str | None:
    """Find the value of an option that decides how the others are parsed."""
    for position, token in enumerate(tokens):
        if token.startswith(f"{name}="):
            return token.partition("=")[2]
        if token == name:
            if position + 1 == len(tokens):
                raise InvalidSettings(f"{name} needs a value")
            return tokens[position + 1]
    return None


def _method(tokens: Sequence[str]) -> str | None:
    """Find the method that a command line or its configuration file names."""
    named: object = _option(tokens, "--method")
    config = _option(tokens, "--config")
    if named is None and config is not None:
        named = _configured(config).get("method")
    return named if isinstance(named, str) else None


def _configured(config: str) -> dict[str, Any]:
    """Return what a configuration file says; nothing, if it is not one: the parser says why."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(config, "rb") as file:
        return tomllib.load(file)
    return {}


def _report(tokens: Sequence[str], error: Exception, exit_code: int | None = None) -> int:
    """Print an error on one line; return the exit code."""
    code = exit_code or (error.exit_code if isinstance(error, UnderstudyError) else 2)
    message = one_line(error)
    if isinstance(error, UnusedCliTokensError) and {"verify", "--ledger"} <= set(tokens):
        message += " Here --ledger takes no path; name a ledger with --ledger-path."
    if isinstance(error, UnusedCliTokensError) and SWITCHED.intersection(error.unused_tokens or ()):
        message += " A switch takes no value: pass --NAME, or --no-NAME."
    if isinstance(error, UnknownOptionError) and tokens[0] in WITH_METHOD_SETTINGS:
        message += "" if _method(tokens) else " Settings of a method need --method."
    if "--json" in tokens:
        print(json.dumps({"event": "error", "message": message, "exit_code": code}), flush=True)
    print(f"understudy: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
