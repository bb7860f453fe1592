"""What several of these tests need."""

import subprocess

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    return folder / "cert.pem", folder / "key.pem"
