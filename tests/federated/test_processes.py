"""A federation of processes: a real SuperLink, clients that are killed, spent, or unknown."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from federation import digits

from understudy import verify

HERE = Path(__file__).parent
LIMIT = 240


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def understudy(folder, *words):
    """Run a command; whatever happens, it does not outlive the test."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(HERE), str(HERE.parent)))
    environment = os.environ | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UNDERSTUDY_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "understudy", "federated", *map(str, words)],
            env=environment, cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(happens, what, processes=()):
    end = time.monotonic() + LIMIT
    while not happens():
        assert time.monotonic() < end, f"{what} did not happen in {LIMIT} s"
        assert all(process.poll() is None for process in processes), f"a process ended: {what}"
        time.sleep(0.2)


def client_words(folder, number, clients, address, *more, rounds=50):
    data = digits(number, clients)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "mine.npz", images=data.images, labels=data.labels)
    return (
        "client", folder / "mine.npz", "--classes", "10", "--critic", "critics:CRITIC",
        "--epsilon", "10", "--rounds", rounds, "--batch", "20", "--server", address, *more,
    )  # fmt: skip


def test_a_killed_client_and_a_spent_one_do_not_stop_a_run(tmp_path):
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "out"
    folders = [tmp_path / name for name in ("stays", "killed", "spent")]
    server = ("server", "--train", "federation:short", "--clients", "3", "--out", out,
              "--address", address, "--patience", "15")  # fmt: skip
    with contextlib.ExitStack() as stack:
        lead = stack.enter_context(understudy(tmp_path / "server", *server))
        wait_for(lambda: (out / "superlink.log").exists(), "start", [lead])
        stays, killed, _ = (
            stack.enter_context(
                understudy(f, *client_words(f, n, 3, address, rounds=4 if n == 2 else 50))
            )
            for n, f in enumerate(folders)
        )
        log = out / "superlink.log"
        refusal = "declined: this client offered 4 rounds"
        told = folders[2] / "log"
        wait_for(lambda: refusal in told.read_text(), "a refusal", [lead, stays])
        killed.kill()
        wait_for(lambda: lead.poll() is not None, "the end")
        assert lead.returncode == 0, (tmp_path / "server" / "log").read_text() + log.read_text()
        stays.send_signal(signal.SIGTERM)
        stays.wait(60)
    said = json.loads((out / "federated.json").read_text())
    assert said["rounds"] == 20
    answered = sorted(part["rounds_answered"] for part in said["answers"])
    assert answered[0] == 4
    assert answered[0] <= answered[1] < answered[2] == 20
    own = json.loads((folders[0] / "federated.json").read_text())
    assert own["rounds_answered"] == 20
    assert 0 < own["server_view"]["epsilon"] < own["server_view"]["epsilon_at_most"] <= 10
    assert np.isfinite(np.load(out / "images.npy")).all()


def test_gs_wgan_with_settings_from_a_file_leaves_a_certified_run(tmp_path):
    address, out = f"127.0.0.1:{free_port()}", tmp_path / 'a "quoted" folder 😀'
    settings = tmp_path / "gs-wgan.toml"
    settings.write_text(
        "# of two lines\nshape = [1, 8, 8]\nclasses = " + json.dumps(list("0123456789"))
        + "\nsteps = 3\nbatch = 20\nwarm_up = 5\nwidth = 4\nimages_per_class = 2\n"
    )  # fmt: skip
    server = ("server", "--clients", "1", "--out", out, "--address", address,
              "--settings", settings)  # fmt: skip
    with contextlib.ExitStack() as stack:
        lead = stack.enter_context(understudy(tmp_path / "server", *server))
        wait_for(lambda: (out / "superlink.log").exists(), "start", [lead])
        words = list(client_words(tmp_path / "client", 0, 1, address, rounds=3))
        words[words.index("critics:CRITIC")] = "understudy.federated.gs_wgan:critic"
        stack.enter_context(understudy(tmp_path / "client", *words))
        wait_for(lambda: lead.poll() is not None, "the end")
        assert lead.returncode == 0, (tmp_path / "server" / "log").read_text()
    found = verify(out)
    assert found.certificate.content["method"]["settings"]["steps"] == 3
    assert found.recomputed_epsilon <= 10
    assert json.loads((out / "federated.json").read_text())["rounds"] == 3


def a_key(path):
    key = ec.generate_private_key(ec.SECP384R1())
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return path


def certificates(folder):
    """A certificate for this machine that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    folder.mkdir()
    (folder / "server.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "server.pem", folder / "server.key"


def test_with_keys_only_known_clients_take_part(tmp_path):
    certificate, secret = certificates(tmp_path / "tls")
    known, stranger = a_key(tmp_path / "known"), a_key(tmp_path / "stranger")
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "out"
    server = (
        "server", "--train", "federation:short", "--clients", "1", "--out", out,
        "--address", address, "--patience", "60", "--certificate", certificate,
        "--certificate-key", secret, "--authority", certificate,
        "--client-keys", known.with_suffix(".pub"),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        lead = stack.enter_context(understudy(tmp_path / "server", *server))
        wait_for(lambda: (out / "superlink.log").exists(), "start", [lead])
        time.sleep(5)

        def take_part(name, key):
            secure = ("--root-certificates", certificate, "--key", key)
            words = client_words(tmp_path / name, 0, 1, address, *secure)
            return stack.enter_context(understudy(tmp_path / name, *words))

        turned_away = take_part("client-unknown", stranger)
        wait_for(lambda: turned_away.poll() is not None, "a refusal", [lead])
        assert not (out / "federated.json").exists()
        take_part("client-known", known)
        wait_for(lambda: lead.poll() is not None, "the end")
        assert lead.returncode == 0, (tmp_path / "server" / "log").read_text()
    assert json.loads((out / "federated.json").read_text())["answers"][0]["rounds_answered"] == 20
