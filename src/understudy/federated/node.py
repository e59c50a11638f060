"""The client's side: a Flower node that runs one program, its own.

Flower's SuperNode runs the app that the server sends along, next to the records. This one speaks
the same protocol with Flower's own connection, but never asks for an app: a round is data.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from understudy.errors import InvalidSettings, RoundDeclined
from understudy.federated.wire import MOST_BYTES, Answer, pack_answer, read_round
from understudy.privacy.client import Client

SECONDS_BETWEEN = 0.1
MOST_OBJECTS = 64
"""Parts that Flower may cut a message into."""
LOG = logging.getLogger("understudy.federated")


def reply(client: Client, message: Any) -> Any:
    """Return the client's reply to a message. It tells the server nothing but answers."""
    told = client.calibration
    said = Answer(
        noise_multiplier=float(told.noise_multiplier),
        delta=float(told.delta_accounted + told.delta_tail),
        noise_std=float(client.noise_std),
    )
    try:
        answer = client.answer(read_round(message.content))
        if answer is not None:
            said = replace(said, slope=torch.frombuffer(bytearray(answer), dtype=torch.float32))
    except RoundDeclined as error:
        LOG.warning("declined: %s", error)
        said = replace(said, declined=str(error))
    except Exception:  # its text may tell of files, or of records: for this side's eyes only
        LOG.exception("a round failed")
        said = replace(said, declined="this client met an error; its own log says which")
    return Message(pack_answer(said), reply_to=message)


def is_loopback(address: str) -> bool:
    """Say whether `HOST:PORT` is this machine.

    >>> [is_loopback(a) for a in ("127.0.0.1:9092", "localhost:1", "[::1]:1", "10.0.0.1:9092")]
    [True, True, True, False]
    """
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere


def check_address(address: str, certificate: Path | None, key: Path | None) -> None:
    """Refuse to speak to another machine unless it is known and knows who speaks."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise InvalidSettings(f"the server is '{address}', expected HOST:PORT")
    if is_loopback(address):
        return
    if certificate is None or key is None:
        raise InvalidSettings(
            f"{address} is another machine, so it must be known and must know this client; pass "
            "--root-certificates CA.pem and --key CLIENT_KEY"
        )


def serve(
    client: Client,
    address: str,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    most_tries: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Connect to a SuperLink and answer rounds until told to stop.

    Args:
        client: who answers.
        address: HOST:PORT of the SuperLink.
        certificate: PEM file of the authority that signed the server's certificate.
        key: this client's private key (elliptic curve, PEM or OpenSSH), registered at the server.
        most_tries: how often to try to connect; by default until it works.
        should_stop: asked between messages.
        answered: called after each message.
    """
    check_address(address, certificate, key)
    from flwr.supernode.fleet_http_connection import http_request_response

    try:
        root = certificate.read_bytes() if certificate else None
    except OSError as error:
        raise InvalidSettings(f"cannot read {certificate} ({error}); check the path") from error
    keys = _key_pair(key) if key and root else None
    with http_request_response(
        address, root is None, root, keys, most_tries and most_tries - 1, None
    ) as connection:
        _, receive, send, _, _, pull, push, confirm = connection
        while not should_stop():
            if (received := receive()) is None:
                time.sleep(SECONDS_BETWEEN)
                continue
            try:
                _handle(client, received, (send, pull, push, confirm))
            except Exception:  # one message that cannot be read, or answered, is not the last
                LOG.exception("a message was dropped")
                time.sleep(SECONDS_BETWEEN)
            answered()


def _handle(client: Client, received: Any, callbacks: Any) -> None:
    """Fetch a message's parts, reply, and send the parts of the reply."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
        pull_objects,
    )

    send, pull, push, confirm = callbacks
    header, tree = received
    run = header.metadata.run_id
    identities = [part.object_id for part in iterate_object_tree(tree)]
    if len(identities) > MOST_OBJECTS:
        raise InvalidSettings(f"a message has {len(identities)} parts; the server is wrong")
    meter = _Meter(lambda identity: pull(run, identity))
    contents = pull_objects(identities, meter.pull, initial_backoff=SECONDS_BETWEEN)
    confirm(run, tree.object_id)
    message = inflate_object_from_contents(tree.object_id, contents)
    if not isinstance(message, Message):
        raise InvalidSettings("something came that is not a message; the server is wrong")
    message.metadata.__dict__["_message_id"] = tree.object_id
    started = time.monotonic()
    answer = reply(client, message)
    answer.metadata.__dict__["_message_id"] = answer.object_id
    parts = get_all_nested_objects(answer)
    wanted, session = send(answer, get_object_tree(answer), time.monotonic() - started)
    for identity in wanted:
        push(run, session, identity, parts[identity].deflate())


class _Meter:
    """Stop fetching a message that is too large; parts are fetched by several threads."""

    def __init__(self, pull: Callable[[str], bytes]) -> None:
        self._pull, self._bytes, self._lock = pull, 0, threading.Lock()

    def pull(self, identity: str) -> bytes:
        """Fetch one part."""
        content = self._pull(identity)
        with self._lock:
            self._bytes += len(content)
            if self._bytes > MOST_BYTES:
                raise InvalidSettings(f"a message exceeds {MOST_BYTES} bytes; the server is wrong")
        return content


def _key_pair(key: Path) -> Any:
    """Read a private key, and derive its public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        content = key.read_bytes()
        is_ssh = b"OPENSSH" in content
        load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        private = load(content, None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidSettings(f"cannot read the key {key} ({error}); check the path") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InvalidSettings(
            f"{key} is no elliptic-curve key; make one with `ssh-keygen -t ecdsa -b 384`"
        )
    return private, private.public_key()
