from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.memory.prefix_cache import TokenChain, chain_seed

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), ("a", "")),
        (("", "a"), ("a", "")),
        ((), ("",)),
        (("\0",), ("",)),
        (("a", "b"), ("b", "a")),
    ],
)
def test_fields_are_told_apart_by_their_lengths(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert chain_seed(*one) != chain_seed(*other)
    assert chain_seed(*one) == chain_seed(*one)


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_seeds_are_equal_only_for_equal_fields(one: list[str], other: list[str]) -> None:
    assert (chain_seed(*one) == chain_seed(*other)) == (one == other)


def test_a_name_is_the_hash_of_all_that_leads_to_it() -> None:
    """The encoding written out once more, by hand: the name before, the count as 8 bytes, each token as 8 bytes."""
    seed = chain_seed("tenant")
    chain = TokenChain(seed, 2)
    chain.extend([1, 2, 3, 258])
    first = hashlib.sha256(seed + bytes.fromhex("0200000000000000 0100000000000000 0200000000000000")).digest()
    second = hashlib.sha256(first + bytes.fromhex("0200000000000000 0300000000000000 0201000000000000")).digest()
    assert chain.digests == [first, second]
    assert chain.blocks == [(1, 2), (3, 258)]


@given(tokens, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_a_chain_made_piece_by_piece_is_that_of_the_whole(token_ids: list[int], cuts: list[int], size: int) -> None:
    whole, pieces = TokenChain(b"seed", size), TokenChain(b"seed", size)
    whole.extend(token_ids)
    for cut in [*sorted(cuts), len(token_ids)]:
        pieces.extend(token_ids[pieces.num_tokens : max(cut, pieces.num_tokens)])
    assert pieces.digests == whole.digests
    assert pieces.blocks == whole.blocks == [tuple(token_ids[i : i + size]) for i in range(0, whole.num_tokens, size)]
    assert whole.num_tokens == len(token_ids) // size * size


@given(tokens, tokens)
def test_names_are_equal_only_as_far_as_all_tokens_before_are(one: list[int], other: list[int]) -> None:
    chains = TokenChain(b"seed", 3), TokenChain(b"seed", 3)
    for chain, token_ids in zip(chains, (one, other), strict=True):
        chain.extend(token_ids)
    for index, (left, right) in enumerate(zip(chains[0].digests, chains[1].digests, strict=False)):
        assert (left == right) == (one[: 3 * index + 3] == other[: 3 * index + 3])


def test_another_seed_gives_other_names() -> None:
    chains = TokenChain(chain_seed("a"), 2), TokenChain(chain_seed("b"), 2)
    for chain in chains:
        chain.extend([1, 2, 3, 4])
    assert not set(chains[0].digests) & set(chains[1].digests)
