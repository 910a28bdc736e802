"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from werkzeug.routing import Rule

from gateway.server import seam


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ordinary-way",
        action="store_true",
        help="have HTTP/1.1 bodies take Hypercorn's ordinary way, as with a Hypercorn that isn't known; "
        "what is done over TLS or HTTP/2 always takes it, and is left out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, over the ordinary way, the variants of tests that never take another one."""
    if config.getoption("--ordinary-way"):
        same = [item for item in items if {"tls", "http2"} & set(re.split(r"[][-]", item.name))]
        config.hook.pytest_deselected(items=same)
        items[:] = [item for item in items if item not in same]


@pytest.fixture(scope="session", autouse=True)
def _ordinary_way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--ordinary-way"):
            patch.setattr(seam, "KNOWN_HYPERCORN", ("another",))
        yield


@pytest.fixture(scope="session", autouse=True)
def _routes_compiled_once() -> Iterator[None]:
    """Compile each route once, not for each gateway: its functions were an eighth of most tests' time."""
    made: dict[tuple[str, str, bool], Callable[..., tuple[str, str]]] = {}
    compiled = Rule._compile_builder

    def once(rule: Rule, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        key = rule.rule, repr(rule.defaults), append_unknown
        if key not in made:
            made[key] = compiled(rule, append_unknown)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "_compile_builder", once)
        yield


@pytest.fixture
def short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way for bodies, also where the tests are run over the ordinary one."""
    monkeypatch.setattr(seam, "KNOWN_HYPERCORN", ("0.18.",))


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
