"""Keys as they are read, and whose they are; what only this machine reaches, and what others do."""

import base64
from pathlib import Path

import pytest

from guerdon.errors import ConfigError, Forbidden, Unauthenticated
from guerdon.server.auth import ANYBODY, Access, Caller
from guerdon.server.runtime import check_addresses
from guerdon.settings.access import AccessConfig, Role, check_reach, check_tls, is_loopback, strip_credentials
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import check_settings
from server.echo_service import EchoService
from server.keys import ADMIN, SCORE, TRAIN, keyed

SCORER = Caller("scorer", Role.SCORE)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GUERDON_API_KEYS", raising=False)


def test_a_key_has_its_holder_and_role(tmp_path: Path) -> None:
    access = Access(keyed(tmp_path))
    assert access.names == ("scorer", "trainer", "keeper")
    for header in (f"Bearer {SCORE}", f"bearer  {SCORE} ", f"Bearer {SCORE}".encode(), basic(f"anybody:{SCORE}")):
        assert access.caller(header) == SCORER
    assert access.caller(None, SCORE) == access.caller(None, SCORE.encode()) == SCORER
    assert access.caller(f"Bearer {ADMIN}", SCORE).role is Role.ADMIN


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", f"Bearer {SCORE[:-1]}", f"Bearer {SCORE}x", f"Bearer {SCORE} {SCORE}",
        f"Token {SCORE}", SCORE, basic(SCORE), basic(f"{SCORE}:"), basic(f"x:{SCORE} "), "Basic ***", "Basic AAA",
        f"Bearer {SCORE}\xff".encode("latin-1"), "Bearer \ud800",
    ],
)  # fmt: skip
def test_anything_else_is_nobodys(header: str | bytes | None, tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Access(keyed(tmp_path)).caller(header)
    assert SCORE not in str(caught.value)


def test_keys_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUERDON_API_KEYS", f"score scorer {'n' * 16}, train other {'o' * 16}\nadmin third {'t' * 16}\n")
    access = Access(keyed(tmp_path))
    assert access.names == ("scorer", "trainer", "keeper", "other", "third")
    assert access.caller("Bearer " + "n" * 16) == access.caller(f"Bearer {SCORE}") == SCORER  # while one is replaced


def test_a_file_of_keys_can_be_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"# score, train and admin\nscore scorer {SCORE}\n  # one, two\n\ntrain trainer {TRAIN}\n"
    monkeypatch.setenv("GUERDON_API_KEYS", text)
    assert Access(AccessConfig()).names == ("scorer", "trainer")
    monkeypatch.delenv("GUERDON_API_KEYS")
    (tmp_path / "keys").write_text(text, encoding="utf-8-sig")  # as some editors save it
    assert Access(AccessConfig(api_keys_file=str(tmp_path / "keys"))).names == ("scorer", "trainer")


@pytest.mark.parametrize("text", [",", " ,\n, ", "# score a key", "\n#one, two\n  # three\n"])
def test_a_variable_in_which_is_no_key_starts_no_server(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever set it would have a server that needs no key, on every address."""
    config = ServerConfig(host="0.0.0.0", port=0, grpc_port=None)
    monkeypatch.setenv("GUERDON_API_KEYS", text)
    for start in (Access, EchoService, check_addresses):
        with pytest.raises(ConfigError, match="GUERDON_API_KEYS is set, and has no keys") as caught:
            start(config)
        assert "ROLE NAME KEY" in caught.value.help
    assert Access(keyed(tmp_path)).names == ("scorer", "trainer", "keeper")  # it only adds to a file
    monkeypatch.setenv("GUERDON_API_KEYS", " \n")  # as if it were not set
    with pytest.raises(ConfigError, match="need no key"):
        check_settings(config)


def test_without_keys_everybody_trains_and_nobody_is_admin() -> None:
    access = Access(AccessConfig())
    assert access.caller(None) == access.caller("Bearer nonsense") == ANYBODY
    ANYBODY.need(Role.TRAIN, "it")
    with pytest.raises(Forbidden, match="needs a key of the role admin, and this server was started without keys"):
        ANYBODY.need(Role.ADMIN, "it")
    with pytest.raises(Forbidden, match="it needs a key of the role train; scorer has the role score"):
        SCORER.need(Role.TRAIN, "it")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "has no keys"),
        ("# only a comment", "has no keys"),
        ("score a", "entry 1 of .* is no key"),
        (f"score a {TRAIN} more", "entry 1 of .* is no key"),
        (f"\nroot a {TRAIN}", "entry 2 of .* does not begin with a role: score, train or admin"),
        (f"{TRAIN} a score", "entry 1 of .* does not begin with a role"),
        (f"score unknown {TRAIN}", "the name cannot be one"),
        (f"score a {TRAIN},", "the key of a cannot travel"),
        (f"score a/b {TRAIN}", "the name cannot be one"),
        ("score a 0123456789abcde", "the key of a has 15 characters"),
        ("score a 0123456789abcdeé", "the key of a cannot travel"),
        (f"score a {TRAIN}\nscore b {TRAIN}", "entry 2 of .* a key a second time"),
        (f"score a {TRAIN}\ntrain a {SCORE}", "entry 2 of .* another role for a"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(lines: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(lines)
    with pytest.raises(ConfigError, match=says) as caught:
        Access(AccessConfig(api_keys_file=str(tmp_path / "keys")))
    shown = f"{caught.value} {caught.value.help}"
    assert caught.value.help
    assert not any(word in shown for word in lines.split() if len(word) >= 15)


def test_a_file_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the keys in .*absent"):
        Access(AccessConfig(api_keys_file=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("host", "reaches"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
        ("", False), ("10.0.0.1", False), ("example.com", False), ("127.0.0.1.example.com", False),
        ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_only_this_machine_reaches_a_loopback(host: str, reaches: bool) -> None:
    assert is_loopback(host) is reaches


def test_an_address_that_others_reach_needs_keys_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "::", "", "10.0.0.1"):
        with pytest.raises(ConfigError, match="which other machines reach") as caught:
            check_settings(ServerConfig(host=host))
        assert "--allow-anonymous" in caught.value.help
    check_settings(ServerConfig(host="127.0.0.1"))
    check_settings(ServerConfig(host="0.0.0.0", api_keys_file="keys"))
    check_settings(ServerConfig(host="0.0.0.0", allow_anonymous=True))
    check_reach(AccessConfig(tls_cert="c", tls_key="k", tls_client_ca="a"), "0.0.0.0")
    with pytest.raises(ConfigError):  # TLS alone asks nobody who they are
        check_reach(AccessConfig(tls_cert="c", tls_key="k"), "0.0.0.0")
    monkeypatch.setenv("GUERDON_API_KEYS", f"score a {SCORE}")
    check_settings(ServerConfig(host="0.0.0.0"))


def test_tls_needs_all_of_its_files() -> None:
    for settings, missing in (
        (AccessConfig(tls_cert="c"), "tls_key"),
        (AccessConfig(tls_key="k"), "tls_cert"),
        (AccessConfig(tls_client_ca="a"), "tls_cert"),
    ):
        with pytest.raises(ConfigError, match=f"{missing} is not"):
            check_tls(settings)


def test_a_url_is_shown_without_its_key() -> None:
    for url in (f"http://x:{SCORE}@host:1/p", f"x:{SCORE}@host:1/p", f"http://{SCORE}@{SCORE}@host:1/p"):
        assert strip_credentials(url).removeprefix("http://") == "host:1/p"
    assert strip_credentials("grpc://host:1") == "grpc://host:1"
