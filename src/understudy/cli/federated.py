"""`understudy federated`: the server of a federation, or one of its clients."""

from __future__ import annotations

import contextlib
import logging
import signal
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.data.reading import Reading
from understudy.errors import InvalidSettings, installing

command = App(name="federated", help="Train with images that stay with their owners, over Flower.")


@command.command
def client(
    data: str,
    *,
    epsilon: float,
    rounds: int,
    critic: str = "understudy.federated.gs_wgan:critic",
    server: str = "127.0.0.1:9092",
    delta: float = 1e-5,
    batch: int = 32,
    clip_norm: float = 1.0,
    most_steps: int = 5,
    name: str = "federation",
    root_certificates: Path | None = None,
    key: Path | None = None,
    statement: Path = Path("federated.json"),
    secure_noise: bool = False,
    reading: Annotated[Reading | None, Parameter(name="*", negative_iterable=())] = None,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Take part with images of one's own; answers are noisy before they leave.

    Parameters
    ----------
    data
        Name of a known set, or path of a folder or file of images.
    critic
        MODULE:NAME of a critic that is installed here, or of a function from the images' public
        facts to one; nothing of the server's is run.
    epsilon
        What the server may learn of these images, over all rounds together.
    rounds
        Rounds that are answered, at most; more rounds, more noise in each.
    server
        HOST:PORT.
    delta
        The delta that goes with epsilon.
    batch
        Images in each question.
    clip_norm
        Norm that the slope of a question is scaled to.
    most_steps
        Learning steps in a round, at most.
    name
        Of this part in the ledger: the same name goes on, another one is charged anew.
    root_certificates
        Authority that signed the server's certificate; needed if it is another machine.
    key
        Private key that the server knows this client by; needed if it is another machine.
    statement
        Where to write what taking part has cost.
    secure_noise
        Draw noise from a cipher (AES-256).
    ledger
        The ledger, if not the user's own.
    """
    _needs_flower()
    from understudy.federated.app import named
    from understudy.federated.gs_wgan import critic_of
    from understudy.federated.node import check_address, serve
    from understudy.files import write_json
    from understudy.pipeline import load_data, register
    from understudy.privacy.client import Offer
    from understudy.privacy.ledger import Ledger
    from understudy.privacy.plan import Budget
    from understudy.privacy.secure import secret_randomness
    from understudy.privacy.vault import Vault

    check_address(server, root_certificates, key)
    logging.basicConfig(level=logging.WARNING)
    out = make_output(output)
    images = load_data(data, progress=out, **vars(reading or Reading()))
    book = Ledger(ledger)
    vault = Vault(images, register(images, ledger=book), book)
    offer = Offer(rounds=rounds, batch=batch, clip_norm=clip_norm, most_steps=most_steps)
    one = vault.open_rounds(
        offer, critic_of(named(critic), vault.facts), Budget(epsilon=epsilon, delta=delta), book,
        run_id=f"federated/{vault.registration.name}/{name}",
        randomness=secret_randomness(vault.device, secure=secure_noise),
    )  # fmt: skip
    out.say(f"{one.rounds_left} of {rounds} rounds are left; waiting for {server}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Wherever it is cut off: what was written down is sent again when asked for, the rest never.
    with contextlib.suppress(KeyboardInterrupt):
        serve(one, server, certificate=root_certificates, key=key)
    said = one.statement()
    write_json(statement, said)
    spent = said["server_view"]["epsilon"]
    cost = "no guarantee" if spent is None else f"epsilon {spent:.4g} against the server"
    out.result(
        f"answered {said['rounds_answered']} of {rounds} rounds: {cost} ({statement})",
        **said,
    )


@command.command
def server(
    *,
    clients: int,
    out: Path,
    train: str = "understudy.federated.gs_wgan:train",
    settings: Path | None = None,
    asked: int = 0,
    patience: float = 60.0,
    most_steps: int = 5,
    address: str = "127.0.0.1:9092",
    certificate: Path | None = None,
    certificate_key: Path | None = None,
    authority: Path | None = None,
    client_keys: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Train a generator with the critics of clients.

    Parameters
    ----------
    clients
        How many take part.
    out
        Folder for what is trained, and for federated.json.
    train
        MODULE:NAME of a function of the critics, the output folder, and what `settings` says.
    settings
        TOML file: for GS-WGAN shape = [channels, height, width], classes = [names], and settings of
        `understudy methods gs-wgan`.
    asked
        Clients asked in each round, chosen secretly; 0 for all.
    patience
        Seconds to wait for answers; for all clients to come at first, a minute or more.
    most_steps
        Learning steps that clients take in one message, as they offer.
    address
        HOST:PORT to listen at.
    certificate
        The server's certificate (PEM); needed if others can reach the address.
    certificate_key
        Its key.
    authority
        Certificate of the authority that signed it.
    client_keys
        Public keys of the clients; needed if others can reach the address.
    """
    _needs_flower()
    from understudy.federated.launch import Federation, Tls, run

    tls = None
    if certificate or certificate_key or authority:
        if not (certificate and certificate_key and authority):
            raise InvalidSettings(
                "a certificate needs its key and authority; pass --certificate, --certificate-key "
                "and --authority together"
            )
        tls = Tls(certificate=certificate, key=certificate_key, authority=authority)
    federation = Federation(
        train=train, out=out, clients=clients, asked=asked, patience=patience, address=address,
        most_steps=most_steps, settings=settings.read_text() if settings else "", tls=tls,
        client_keys=tuple(client_keys or ()),
    )  # fmt: skip
    shown: Any = make_output(output)
    shown.say(f"waiting for {clients} clients at {address}")
    statement = run(federation)
    shown.result(f"finished: {statement}", statement=str(statement))


def _needs_flower() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise InvalidSettings(
            f"federations need Flower, which is not installed; {installing('federated')}"
        )
