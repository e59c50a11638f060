"""Start a SuperLink, and the server's app beside it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import InvalidSettings, ProcessLost
from understudy.federated.app import APP, FAILED, MODULE, STATEMENT
from understudy.federated.node import is_loopback
from understudy.files import make_directory, write_file

SECONDS_TO_START = 60
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The server's certificate, its key, and the authority that signed it: PEM files."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What is to be trained, with whom, and where the server listens."""

    train: str
    """MODULE:NAME of a function of the critics and the output folder."""
    out: Path
    clients: int
    asked: int = 0
    """Clients asked in each round; 0 for all."""
    patience: float = 60.0
    most_steps: int = 5
    """Learning steps that clients take in one message."""
    settings: str = ""
    """What else `train` is given, by name: TOML."""
    address: str = "127.0.0.1:9092"
    tls: Tls | None = None
    client_keys: Sequence[Path] = ()
    """Public keys of the clients; needed wherever others can connect."""

    def __post_init__(self) -> None:
        if is_loopback(self.address):
            return
        if self.tls is None or len(self.client_keys) < self.clients:
            raise InvalidSettings(
                f"{self.address} can be reached by other machines, so the server must show who it "
                f"is and know its {self.clients} clients; pass --certificate, --certificate-key, "
                "--authority, and --client-keys with a public key of each"
            )


def run(federation: Federation) -> Path:
    """Run a federation to its end; return the statement that it leaves."""
    out = federation.out.resolve()
    if (out / STATEMENT).exists() or (out / "release").exists():
        raise InvalidSettings(f"{out} holds a finished federation; choose another folder")
    for folder in ("app", "flower"):
        make_directory(out / folder)
    (out / FAILED).unlink(missing_ok=True)
    settings: dict[str, str | int | float] = {
        "train": federation.train, "out": str(out), "clients": federation.clients,
        "asked": federation.asked, "patience": float(federation.patience),
        "most_steps": federation.most_steps, "settings": federation.settings,
    }  # fmt: skip
    lines = "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items())
    write_file(out / "app" / "pyproject.toml", (APP + lines).encode())
    write_file(out / "app" / "understudy_server.py", MODULE.encode())
    write_file(out / "flower" / "config.toml", _connection(federation).encode())
    with _superlink(federation, out) as link:
        _flower("supernode", "list", "here", out=out, until=time.monotonic() + SECONDS_TO_START)
        for key in federation.client_keys:
            _flower("supernode", "register", str(key.resolve()), "here", out=out)
        _flower("run", str(out / "app"), "here", out=out)
        while not (out / STATEMENT).exists():
            if (out / FAILED).exists():
                raise ProcessLost(json.loads((out / FAILED).read_bytes())["message"])
            if link.poll() is not None:
                raise ProcessLost(f"the SuperLink has ended; {out / 'superlink.log'} says why")
            time.sleep(0.2)
    return out / STATEMENT


def _toml(value: str | int | float) -> str:
    """Write a value as TOML; its strings escape as JSON's do, but know no surrogates."""
    return json.dumps(value, ensure_ascii=False)


def _connection(federation: Federation) -> str:
    lines = ["[superlink]", 'default = "here"', "", "[superlink.here]"]
    lines.append(f"address = {_toml(federation.address)}")
    if federation.tls:
        lines.append(f"root-certificates = {_toml(str(federation.tls.authority.resolve()))}")
    else:
        lines.append("insecure = true")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _superlink(federation: Federation, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    host, _, port = federation.address.rpartition(":")
    command = [_program("flower-superlink"), "--host", host.strip("[]"), "--port", port]
    command += ["--disable-runtime-dependency-installation", "--log-file"]
    command += [str(out / "superlink.log")]
    if tls := federation.tls:
        command += ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key)]
        command += ["--ssl-ca-certfile", str(tls.authority)]
    else:
        command += ["--insecure"]
    if federation.client_keys:
        command += ["--enable-supernode-auth"]
    link = subprocess.Popen(
        command, env=_environment(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield link
    finally:
        link.terminate()
        try:
            link.wait(20)
        except subprocess.TimeoutExpired:
            link.kill()


def _flower(*words: str, out: Path, until: float = 0.0) -> None:
    """Run a command of Flower's; again and again `until` then, for a server that is starting."""
    while True:
        done = subprocess.run(
            [_program("flwr"), *words],
            env=_environment(out), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        if time.monotonic() > until:
            said = " ".join((done.stdout + done.stderr).split())[-500:]
            raise ProcessLost(f"`flwr {words[0]}` failed: {said}")
        time.sleep(0.5)


def _environment(out: Path) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join((beside, os.environ.get("PATH", "")))
    return os.environ | QUIET | {"FLWR_HOME": str(out / "flower"), "PATH": path}


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)
