"""Tokens of an identity provider next to API keys: whose are taken, whom they speak for, and which are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from remat_service.errors import Unauthorized, Unavailable
from remat_service.settings import Settings
from remat_service.web import authentication
from service.serving import Listener, Service, at_peak, serving, training_graph
from service.test_tenants import Tenant, cli

HERE = Path(__file__).parent


class Issuer(Listener):
    """A provider that publishes its keys as the standard says."""

    def __init__(self) -> None:
        self.keys = {"one": rsa.generate_private_key(public_exponent=65537, key_size=2048)}
        self.asked = 0
        self.answers = threading.Event()  # while it is not set, nobody is answered
        self.answers.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.answers.wait(60)
                documents = {
                    "/.well-known/openid-configuration": {"issuer": issuer.url, "jwks_uri": issuer.url + "/keys"},
                    "/keys": {"keys": [issuer.public(kid) for kid in issuer.keys]},
                }
                body = json.dumps(documents[self.path]).encode()
                with suppress(OSError):  # who has asked may have given up
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        super().__init__(Handler)

    def public(self, kid: str) -> dict[str, Any]:
        """A public key, as it is published."""
        numbers = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.keys[kid].public_key()))
        return {**numbers, "kid": kid, "use": "sig", "alg": "RS256"}

    def token(self, kid: str = "one", key: Any = None, algorithm: str = "RS256", **changes: Any) -> str:
        """A token for a member of the group `vision`, with some claims changed; None leaves one out."""
        claims = {"iss": self.url, "aud": "remat", "sub": "anna", "exp": time.time() + 60, "groups": ["vision"]}
        claims = {name: value for name, value in (claims | changes).items() if value is not None}
        return jwt.encode(claims, key or self.keys[kid], algorithm=algorithm, headers={"kid": kid})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """One provider."""
    with Issuer() as found:
        yield found


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Iterator[Service]:
    """A service that takes its tokens, with tenants for two of its groups."""
    folder = tmp_path_factory.mktemp("oidc")
    with serving(folder, workers=1, require_keys="true", oidc_issuer=issuer.url) as running:
        for name in ("vision", "speech"):
            cli(running, "tenants", "add", name, "--identity-group", name)
        yield running


def status(service: Service, token: str, **headers: str) -> int:
    """What a request with this token is answered."""
    return service.http.get("/v1/solves", headers={"Authorization": f"Bearer {token}", **headers}).status_code


def test_a_token_speaks_for_the_tenant_of_its_group(own: Service, issuer: Issuer) -> None:
    """It and an API key of the same tenant see the same requests; one of another group does not."""
    token, key = Tenant(own, issuer.token()), Tenant(own, cli(own, "keys", "create", "vision", "--new-tenant"))
    posted = token.post(at_peak(training_graph(5))).json()
    assert key.http.get(f"/v1/solves/{posted['id']}").status_code == 200
    other = Tenant(own, issuer.token(groups=["speech"]))
    assert other.http.get(f"/v1/solves/{posted['id']}").status_code == 404


@pytest.mark.thorough
def test_several_tenants_and_none(own: Service, issuer: Issuer) -> None:
    """Who is in several groups says which tenant is meant; who is in none of ours is refused by name."""
    both = issuer.token(groups=["vision", "speech", "unknown"])
    refused = own.http.get("/v1/solves", headers={"Authorization": f"Bearer {both}"})
    assert refused.status_code == 403
    assert "speech, vision" in refused.json()["detail"]
    assert status(own, both, **{"Remat-Tenant": "speech"}) == 200
    assert status(own, both, **{"Remat-Tenant": "unknown"}) == 403
    assert status(own, issuer.token(groups=["vision"]), **{"Remat-Tenant": "speech"}) == 403
    for groups in (["unknown"], [], None, [None], {"vision": True}):
        assert status(own, issuer.token(groups=groups)) == 403
    assert status(own, issuer.token(groups="vision")) == 200


def _stranger(issuer: Issuer) -> str:
    return issuer.token(key=rsa.generate_private_key(public_exponent=65537, key_size=2048))


def _public_as_secret(issuer: Issuer) -> str:
    pem = issuer.keys["one"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    body = issuer.token().split(".")
    header = jwt.utils.base64url_encode(b'{"alg":"HS256","kid":"one"}').decode()
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        f"{header}.{body[1]}".encode(), pem
    )
    return f"{header}.{body[1]}.{jwt.utils.base64url_encode(signature).decode()}"


def _unsigned(issuer: Issuer) -> str:
    header = jwt.utils.base64url_encode(b'{"alg":"none","kid":"one"}').decode()
    return f"{header}.{issuer.token().split('.')[1]}."


FORGED: dict[str, Callable[[Issuer], str]] = {
    "expired": lambda issuer: issuer.token(exp=time.time() - 60),
    "no end": lambda issuer: issuer.token(exp=None),
    "another audience": lambda issuer: issuer.token(aud="other"),
    "no audience": lambda issuer: issuer.token(aud=None),
    "another issuer": lambda issuer: issuer.token(iss="http://elsewhere"),
    "no subject": lambda issuer: issuer.token(sub=None),
    "not yet": lambda issuer: issuer.token(nbf=time.time() + 600),
    "another key": _stranger,
    "an unknown key": lambda issuer: issuer.token(kid="two", key=issuer.keys["one"]),
    "the public key as a secret": _public_as_secret,
    "no signature": _unsigned,
    "no token": lambda issuer: "a.b.c",
    "changed": lambda issuer: issuer.token()[:-8] + "AAAAAAAA",
}


@pytest.mark.parametrize("how", FORGED)
def test_forged_tokens_are_refused_in_the_same_words(own: Service, issuer: Issuer, how: str) -> None:
    """401, and nothing about why: that is in the log."""
    token = FORGED[how](issuer)
    reply = own.http.get("/v1/solves", headers={"Authorization": f"Bearer {token}"})
    assert (reply.status_code, reply.json()["detail"]) == (401, "this token is not valid")


@pytest.mark.thorough
def test_unknown_keys_are_not_asked_for_again_and_again(own: Service, issuer: Issuer) -> None:
    """A stranger's tokens don't become requests to the provider."""
    assert status(own, issuer.token()) == 200
    asked = issuer.asked
    for number in range(20):
        header = {"alg": "RS256", "kid": f"none {number}"}
        forged = jwt.utils.base64url_encode(json.dumps(header).encode()).decode() + ".e30.AAAA"
        assert status(own, forged) == 401
    assert issuer.asked - asked <= 2


@pytest.mark.thorough
def test_without_its_provider_the_service_says_so(tmp_path: Path) -> None:
    """503 for tokens; API keys work on."""
    with serving(tmp_path, workers=1, require_keys="true", oidc_issuer="http://127.0.0.1:9") as own, Issuer() as other:
        assert status(own, other.token()) == 503
        assert status(own, cli(own, "keys", "create", "anna", "--new-tenant")) == 200


@pytest.mark.thorough
async def test_a_strangers_token_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the provider is asked for an unknown key, tokens signed by known ones are verified."""
    monkeypatch.setattr(authentication, "_AGAIN_S", 0.0)
    with Issuer() as issuer:
        verifier = authentication.Tokens(Settings(oidc_issuer=issuer.url))
        assert (await verifier.verify(issuer.token())) == ("vision",)
        issuer.answers.clear()
        asked = issuer.asked
        strangers = [asyncio.create_task(verifier.verify(FORGED["an unknown key"](issuer))) for _ in range(3)]
        await until(lambda: issuer.asked > asked)
        assert (await verifier.verify(issuer.token())) == ("vision",)
        assert not any(stranger.done() for stranger in strangers)
        strangers.pop().cancel()  # who goes away takes nothing from the others
        issuer.answers.set()
        assert [type(each) for each in await asyncio.gather(*strangers, return_exceptions=True)] == [Unauthorized] * 2
        assert issuer.asked == asked + 2


@pytest.mark.thorough
async def test_a_silent_provider_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens at once are refused after one silence, the seventh at once; known keys outlive one of any length."""
    monkeypatch.setattr(authentication, "_ANSWER_S", 0.5)
    monkeypatch.setattr(authentication, "_FAILED_FOR_S", 3600.0)
    with Issuer() as issuer:
        issuer.answers.clear()
        verifier = authentication.Tokens(Settings(oidc_issuer=issuer.url))
        refused = await asyncio.gather(*(verifier.verify(issuer.token()) for _ in range(6)), return_exceptions=True)
        assert [type(each) for each in refused] == [Unavailable] * 6
        with pytest.raises(Unavailable):
            await verifier.verify(issuer.token())
        assert issuer.asked == 1
        issuer.answers.set()
        monkeypatch.setattr(authentication, "_FAILED_FOR_S", 0.0)
        assert (await verifier.verify(issuer.token())) == ("vision",)
        issuer.answers.clear()
        monkeypatch.setattr(authentication, "_KEYS_FOR_S", 0.0)
        monkeypatch.setattr(authentication, "_AGAIN_S", 0.0)
        for _ in range(3):
            assert (await verifier.verify(issuer.token())) == ("vision",)
        await until(lambda: verifier._fetching is None)  # it ends within the test
        issuer.answers.set()


@pytest.mark.thorough
async def test_a_key_that_was_withdrawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of long ago are fetched before one of them is used again."""
    with Issuer() as issuer:
        verifier = authentication.Tokens(Settings(oidc_issuer=issuer.url))
        issuer.keys["two"] = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        token = issuer.token("two")
        assert (await verifier.verify(token)) == ("vision",)
        del issuer.keys["two"]
        assert (await verifier.verify(token)) == ("vision",)
        monkeypatch.setattr(authentication, "_KEYS_FOR_S", 0.0)
        monkeypatch.setattr(authentication, "_AGAIN_S", 0.0)
        with pytest.raises(Unauthorized):
            await verifier.verify(token)


async def until(true: Callable[[], bool]) -> None:
    """Wait for what happens in another thread or task."""
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_with_a_provider_that_others_wrote(tmp_path: Path) -> None:
    """Client credentials of npm's `oidc-provider`: its tokens are taken as they are."""
    for name in ("provider.mjs", "package.json"):
        shutil.copy(HERE / "oidc" / name, tmp_path)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=tmp_path, check=True, timeout=240)
    provider = subprocess.Popen(["node", "provider.mjs"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        url = provider.stdout.readline().strip()
        asked = httpx2.post(f"{url}/token", data={"grant_type": "client_credentials"}, auth=("trainer", "secret"))
        token = asked.json()["access_token"]
        with serving(tmp_path / "service", workers=1, require_keys="true", oidc_issuer=url) as own:
            assert status(own, token) == 403  # no tenant yet
            cli(own, "tenants", "add", "vision", "--identity-group", "vision")
            time.sleep(2.2)
            assert status(own, token) == 200
    finally:
        provider.kill()
        provider.wait()
        provider.stdout.close()
