from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from manylora.errors import AuthenticationError
from manylora.registry.access.sessions import LINK_S, MAX_PER_SECRET, SESSION_S
from manylora.registry.db.models import TenantRow
from manylora.registry.records import Credential, Identity
from manylora.registry.registry import Registry
from registry_samples import StandingClock

pytestmark = pytest.mark.anyio


@pytest.fixture
async def holder(registry: Registry, acme: TenantRow) -> Identity:
    """Who holds a key of the tenant."""
    _, secret = await registry.keys.create_key(acme.name, "browser", ["usage"])
    return await registry.key_ring.authenticate(secret)


def credential(identity: Identity) -> Credential:
    assert identity.credential is not None
    return identity.credential


async def refusal(registry: Registry, token: str) -> str:
    with pytest.raises(AuthenticationError) as raised:
        await registry.key_ring.identify_session(token)
    return raised.value.code


async def test_a_session_is_who_began_it_until_it_is_ended(
    registry: Registry, holder: Identity
) -> None:
    token, _ = await registry.sessions.begin_session(credential(holder))
    other, _ = await registry.sessions.begin_session(credential(holder))
    assert await registry.key_ring.identify_session(token) == holder
    await registry.sessions.end_session(token)
    await registry.sessions.end_session(token)
    assert await refusal(registry, token) == "session.ended"
    assert await registry.key_ring.identify_session(other) == holder


async def test_a_guessed_link_waits_for_no_writer(registry: Registry, holder: Identity) -> None:
    session, _ = await registry.sessions.begin_session(credential(holder))
    async with registry.database.write():
        for token in ("manylora_link_guessed", session):
            with pytest.raises(AuthenticationError) as raised:
                await asyncio.wait_for(registry.sessions.follow_link(token), 60)
            assert raised.value.code == "session.link_used"


async def test_endless_sign_ins_do_not_fill_the_database(
    registry: Registry, other: TenantRow, holder: Identity, clock: StandingClock
) -> None:
    _, secret = await registry.keys.create_key(other.name)
    bystander, _ = await registry.sessions.begin_session(
        credential(await registry.key_ring.authenticate(secret))
    )
    link, _ = await registry.sessions.begin_session(credential(holder), "link")
    tokens = []
    for _ in range(MAX_PER_SECRET + 2):
        clock.now += timedelta(seconds=1)
        tokens.append((await registry.sessions.begin_session(credential(holder)))[0])
    for token in tokens[:2]:
        assert await refusal(registry, token) == "session.ended"
    for token in (tokens[2], tokens[-1]):
        assert await registry.key_ring.identify_session(token) == holder
    assert (await registry.key_ring.identify_session(bystander)).tenant == "other"
    assert await registry.sessions.follow_link(link) == holder


async def test_a_session_ends_after_its_time(
    registry: Registry, holder: Identity, clock: StandingClock
) -> None:
    token, ends = await registry.sessions.begin_session(credential(holder))
    assert ends == clock() + timedelta(seconds=SESSION_S)
    clock.now = ends - timedelta(seconds=1)
    assert await registry.key_ring.identify_session(token) == holder
    clock.now = ends
    assert await refusal(registry, token) == "session.ended"


async def test_a_session_is_worth_what_its_key_is_now_and_ends_with_it(
    registry: Registry, holder: Identity
) -> None:
    token, _ = await registry.sessions.begin_session(credential(holder))
    await registry.keys.update_key(holder.key_id or "", scopes=["infer"])
    assert (await registry.key_ring.identify_session(token)).scopes == ("infer",)
    await registry.keys.revoke_key(holder.key_id or "")
    assert await refusal(registry, token) == "session.ended"


async def test_a_rotation_ends_the_sessions_of_the_secret_before_it(
    registry: Registry, holder: Identity, clock: StandingClock
) -> None:
    token, _ = await registry.sessions.begin_session(credential(holder))
    await registry.keys.rotate_key(holder.key_id or "", grace_s=60)
    assert (await registry.key_ring.identify_session(token)) == holder
    clock.now += timedelta(seconds=61)
    assert await refusal(registry, token) == "session.ended"


async def test_a_link_is_no_session_and_works_once(registry: Registry, holder: Identity) -> None:
    link, _ = await registry.sessions.begin_session(credential(holder), "link")
    assert await refusal(registry, link) == "session.ended"
    with pytest.raises(AuthenticationError):
        await registry.key_ring.authenticate(link)
    answers = await asyncio.gather(
        *(registry.sessions.follow_link(link) for _ in range(4)), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["AuthenticationError"] * 3 + [
        "Identity"
    ]
    assert [answer for answer in answers if isinstance(answer, Identity)] == [holder]


async def test_a_link_is_soon_too_old_and_a_session_is_no_link(
    registry: Registry, holder: Identity, clock: StandingClock
) -> None:
    link, _ = await registry.sessions.begin_session(credential(holder), "link")
    token, _ = await registry.sessions.begin_session(credential(holder))
    clock.now += timedelta(seconds=LINK_S)
    for wrong in (link, token, "manylora_link_guessed"):
        with pytest.raises(AuthenticationError) as raised:
            await registry.sessions.follow_link(wrong)
        assert raised.value.code == "session.link_used"
    assert await registry.key_ring.identify_session(token) == holder
