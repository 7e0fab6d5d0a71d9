"""The socket that is bound before anything else happens."""

from __future__ import annotations

import errno
import re
import socket
import subprocess
from pathlib import Path

import pytest
from support.certificate import self_signed

from config.errors import ConfigError
from server.listen import bind, check_tls, refusal, url_of


def test_port_zero_is_any_free_port() -> None:
    with bind("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0


def test_connections_are_refused_until_the_socket_listens() -> None:
    with bind("127.0.0.1", 0) as bound:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), timeout=1)
        bound.listen()
        socket.create_connection(bound.getsockname(), timeout=1).close()


def test_a_port_whose_last_connection_has_just_ended_can_be_had_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        accepted, _ = server.accept()
        accepted.close()  # the server's side ends first and is left in TIME_WAIT
        client.close()
    bind(*address).close()


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    message = "is in use: stop what listens there, or choose another --port"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=message):
        bind(*taken.getsockname())


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind("no host of this name", 0)


def test_other_reasons_are_told_as_they_are() -> None:
    assert "needs privileges" in str(refusal(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 80))
    assert "no such thing" in str(refusal(OSError(errno.EIO, "No such thing"), "127.0.0.1", 80))


def test_a_client_on_this_machine_can_use_the_url() -> None:
    with bind("0.0.0.0", 0) as bound:
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_an_address_of_ipv6_is_in_brackets() -> None:
    try:
        bound = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 loopback address here")
    with bound:
        assert url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"


def test_a_certificate_or_key_that_cannot_be_used_is_a_sentence_that_names_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    (crt, key), (_, other) = self_signed(Path()), self_signed(Path("other"))
    bad, both = Path("bad.pem"), Path("both.pem")
    bad.write_text("nonsense")
    both.write_text(crt.read_text() + key.read_text())
    no_key = "holds no private key in PEM form that can be read: --ssl-keyfile names the file of one"
    check_tls(crt, key)
    check_tls(both, None)
    for certfile, keyfile, says in (
        (None, key, "--ssl-keyfile needs --ssl-certfile"),
        (crt, None, f"--ssl-certfile cert.pem {no_key}"),
        (Path("none"), key, "--ssl-certfile none cannot be read: no such file or directory"),
        (crt, Path("none"), "--ssl-keyfile none cannot be read: no such file or directory"),
        (bad, key, "--ssl-certfile bad.pem holds no certificate in PEM form"),
        (key, None, "--ssl-certfile key.pem holds no certificate in PEM form"),
        (crt, bad, f"--ssl-keyfile bad.pem {no_key}"),
        (crt, other, "--ssl-keyfile other/key.pem is not the key of the --ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
            check_tls(certfile, keyfile)


def test_a_passphrase_is_refused_instead_of_asked_for(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    locked, both = tmp_path / "locked.pem", tmp_path / "both.pem"
    lock = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(lock, check=True)
    both.write_text(certificate.read_text() + locked.read_text())
    for certfile, keyfile, flag in ((certificate, locked, "--ssl-keyfile"), (both, None, "--ssl-certfile")):
        with pytest.raises(ConfigError, match=f"^{flag} {keyfile or certfile} has a passphrase: write it without one"):
            check_tls(certfile, keyfile)
