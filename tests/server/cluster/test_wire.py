from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.registry.registry import Registry
from manylora.server.cluster.wire import Frames, cluster_token, frame
from manylora.server.hop import Counts

counts = st.builds(Counts, *[st.integers(0, 2**32 - 1)] * 3)
HEADER_BYTES = 16


@given(
    st.lists(st.tuples(st.binary(max_size=40), counts), max_size=8),
    st.lists(st.integers(1, 50)),
    st.integers(0, 60),
)
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[bytes, Counts]], cuts: list[int], num_lost: int
) -> None:
    data = b"".join(frame(payload, billed) for payload, billed in sent)
    data = data[: max(0, len(data) - num_lost)]
    whole: list[tuple[bytes, Counts]] = []
    end = 0
    for payload, billed in sent:
        end += HEADER_BYTES + len(payload)
        if end <= len(data):
            whole.append((payload, billed))
    frames, got, at = Frames(), b"", 0
    for size in [*cuts, len(data)]:
        got += frames.take(data[at : at + size])
        at += size
    assert got == b"".join(payload for payload, _ in whole)
    assert frames.counts == (whole[-1][1] if whole else Counts(0, 0, 0))


def test_an_empty_payload_still_carries_counts() -> None:
    frames = Frames()
    assert frames.take(frame(b"", Counts(3, 2, 1))) == b""
    assert frames.counts == Counts(3, 2, 1)


@pytest.mark.anyio
async def test_servers_with_one_pepper_have_one_token_that_is_no_secret_and_no_digest_of_one(
    tmp_path: Path,
) -> None:
    tokens = []
    for folder, pepper in (("a", "p" * 16), ("b", "p" * 16), ("c", "q" * 16)):
        registry = await Registry.open(None, tmp_path / folder, "admin-secret", pepper=pepper)
        tokens.append(cluster_token(registry.key_ring))
        secrets = (pepper, "admin-secret")
        assert tokens[-1] not in (*secrets, *map(registry.key_ring.digest, secrets))
        await registry.close()
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
