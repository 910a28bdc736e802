"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme


@dataclass(frozen=True)
class Tls:
    """A certificate for the gateway, and an authority that vouches for it."""

    certificate: Path
    key: Path
    authority: trustme.CA

    @property
    def section(self) -> dict[str, str]:
        """As `[server]` has it under `tls`."""
        return {"certificate": str(self.certificate), "key": str(self.key)}

    @property
    def trusted(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(folder / "certificate.pem"), append=True)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return Tls(folder / "certificate.pem", folder / "key.pem", authority)
