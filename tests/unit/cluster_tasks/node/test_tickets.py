"""A browser is logged in by a ticket, which is good once and for a minute."""

from __future__ import annotations

import json

import pytest
from ray._private.authentication.authentication_constants import AUTHENTICATION_TOKEN_COOKIE_NAME

from cluster_tasks.node import identity
from cluster_tasks.node.identity import Front

TOKEN = "ab" * 32


def front(token: str | None = TOKEN) -> Front:
    return Front(1, "lab", token)


def ticket(of: Front, *lines: bytes) -> dict[str, str]:
    return json.loads(of.ticket([b"POST /flotilla/ticket HTTP/1.1\r\n", *lines, b"\r\n"]).partition(b"\r\n\r\n")[2])


SHOWN = f"Authorization: Bearer {TOKEN}\r\n".encode()


def test_a_ticket_gives_rays_cookie_once():
    asked = front()
    given = ticket(asked, SHOWN)["ticket"]
    head = asked.opened(f"ticket={given}".encode()).decode()
    assert head.startswith("HTTP/1.1 303 ") and "\r\nLocation: /\r\n" in head
    assert f"Set-Cookie: {AUTHENTICATION_TOKEN_COOKIE_NAME}={TOKEN}; Path=/; HttpOnly; SameSite=Strict" in head
    assert asked.opened(f"ticket={given}".encode()).startswith(b"HTTP/1.1 403 ")


def test_it_is_good_for_a_minute(monkeypatch):
    asked = front()
    given = ticket(asked, SHOWN)["ticket"]
    now = identity.time.monotonic()
    monkeypatch.setattr(identity.time, "monotonic", lambda: now + identity.TICKET_SECONDS + 1)
    assert asked.opened(f"ticket={given}".encode()).startswith(b"HTTP/1.1 403 ")
    ticket(asked, SHOWN)
    assert given not in asked.tickets and len(asked.tickets) == 1


@pytest.mark.parametrize("lines", [[], [b"Authorization: Bearer \r\n"], [SHOWN.replace(b"ab", b"ba")], [SHOWN.replace(b"Bearer ", b"")]])
def test_who_does_not_show_the_token_gets_none(lines):
    asked = front()
    assert "ticket" not in ticket(asked, *lines) and not asked.tickets


@pytest.mark.parametrize("form", [b"", b"ticket=", b"ticket=x", b"\xff\xfe", b"ticket=%00", b"other=1"])
def test_a_form_without_a_good_ticket_is_refused(form):
    asked = front()
    ticket(asked, SHOWN)
    assert asked.opened(form).startswith(b"HTTP/1.1 403 ") and len(asked.tickets) == 1


def test_a_cluster_that_asks_for_no_token_gives_no_cookie():
    asked = front(None)
    head = asked.opened(f"ticket={ticket(asked)['ticket']}".encode())
    assert head.startswith(b"HTTP/1.1 303 ") and b"Set-Cookie" not in head
