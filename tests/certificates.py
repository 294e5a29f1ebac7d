"""A certificate of this machine's own."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Of localhost, and its key; the test is skipped where they cannot be made."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    files = directory / "cert.pem", directory / "key.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-out",
        str(files[0]),
        "-keyout",
        str(files[1]),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return files
