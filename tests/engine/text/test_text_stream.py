from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from manylora.engine.request import RequestOutput, TokenLogprobs
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import (
    Detokenizer,
    StopScanner,
    TextDelta,
    TextStream,
    prompt_offsets,
    settled_text,
)
from manylora.engine.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "manylora" / "demo" / "manylora-demo"


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary as Llama 2 has it: pieces with a space mark, all bytes, a decoder that drops the first space."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁Hello", "▁world", "lo", "é", "叫", ",", "▁▁", "a", "b", "▁a"]
    backend = Backend(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder, wrapped = tmp_path_factory.mktemp("sentencepiece"), cast(Any, PreTrainedTokenizerFast)
    wrapped(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return Tokenizer(folder)


def streamed(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 639), max_size=120))
def test_parts_add_up_to_the_whole_for_byte_level_vocabularies(token_ids: list[int]) -> None:
    assert "".join(streamed(byte_level(), token_ids)) == byte_level().decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_the_whole_for_sentencepiece_vocabularies(
    sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    token = st.one_of(st.integers(0, 269), st.integers(257, 269))
    token_ids = data.draw(st.lists(token, max_size=80))
    assert "".join(streamed(sentencepiece, token_ids)) == sentencepiece.decode(token_ids)


def test_parts_add_up_to_the_whole_for_long_garbage() -> None:
    continuation = [byte_level().encode("é")[-1]] * 500
    assert "".join(streamed(byte_level(), continuation)) == byte_level().decode(continuation)


def test_no_part_ever_holds_half_a_character() -> None:
    text = "naïve café 叫你 🙂🙂 ok"
    parts = streamed(byte_level(), byte_level().encode(text, add_special_tokens=False))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in tokenizer.encode("叫", add_special_tokens=False)] == [
        "",
        "",
        "叫",
    ]


def test_the_first_token_keeps_its_space_after_a_prompt(sentencepiece: Tokenizer) -> None:
    hello, world = 260, 261
    assert "".join(streamed(sentencepiece, [world, world])) == "world world"
    assert "".join(streamed(sentencepiece, [world, world], prompt_ids=[1, hello])) == " world world"


def stream_of(stop: tuple[str, ...] = (), **params: Any) -> TextStream:
    return TextStream(byte_level(), SamplingParams(stop=stop, **params))


def outputs(text: str, finish_reason: Any = None) -> list[RequestOutput]:
    ids = byte_level().encode(text, add_special_tokens=False)
    made = [RequestOutput(request_id="x", token_ids=[token_id]) for token_id in ids]
    return (
        [*made, RequestOutput(request_id="x", finish_reason=finish_reason)]
        if finish_reason
        else made
    )


def push_all(stream: TextStream, made: list[RequestOutput]) -> list[TextDelta]:
    return [stream.push(output) for output in made]


def test_a_stop_string_may_span_tokens_and_is_not_shown() -> None:
    stream = stream_of(("you?",))
    deltas = push_all(stream, outputs("Hello, how are you? Fine"))
    assert "".join(delta.text for delta in deltas) == "Hello, how are "
    assert [(d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason] == [
        ("stop", "you?")
    ]


def test_delivered_tokens_end_with_the_one_that_completed_the_stop_string() -> None:
    ids = byte_level().encode("Hello, how are you? Fine", add_special_tokens=False)
    stream = stream_of(("you?",))
    logprobs = [TokenLogprobs(token_id=token_id, logprob=-1.0, rank=1) for token_id in ids]
    delta = stream.push(RequestOutput(request_id="x", token_ids=ids, logprobs=logprobs))
    stop_at = len(byte_level().encode("Hello, how are you?", add_special_tokens=False))
    assert stream.num_tokens == len(delta.token_ids) == stop_at
    assert delta.token_ids == ids[:stop_at]
    assert delta.logprobs == logprobs[:stop_at]
    assert stream.push(RequestOutput(request_id="x", token_ids=ids)) == TextDelta()
    assert stream.num_tokens == stop_at


def test_text_that_may_start_a_stop_string_is_held_back_and_released() -> None:
    deltas = push_all(stream_of(("Hello!",)), outputs("Hello, how", "length"))
    assert [delta.text for delta in deltas][:2] == ["", "Hello,"]
    assert "".join(delta.text for delta in deltas) == "Hello, how"
    assert deltas[-1].finish_reason == "length"
    assert (
        push_all(stream_of(("Hello!",)), outputs("Hello", "length"))[-1].text == "Hello"
    )  # by the end at the latest


def test_the_end_of_sequence_token_is_counted_and_not_shown() -> None:
    eos = next(iter(byte_level().eos_token_ids))
    stream = stream_of()
    hello = byte_level().encode("Hello", add_special_tokens=False)
    delta = stream.push(
        RequestOutput(
            request_id="x", token_ids=[*hello, eos], finish_reason="stop", stop_token_id=eos
        )
    )
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("Hello", "stop", None)
    assert stream.num_tokens == len(hello) + 1


def test_a_stop_token_is_the_stop_reason_and_not_shown() -> None:
    (comma,) = byte_level().encode(",", add_special_tokens=False)
    stream = stream_of(stop_token_ids=(comma,))
    delta = stream.push(
        RequestOutput(request_id="x", token_ids=[comma], finish_reason="stop", stop_token_id=comma)
    )
    assert (delta.text, delta.stop_reason) == ("", comma)


def test_offsets_say_how_much_was_readable_before_each_token() -> None:
    token_ids = byte_level().encode("Hello, 叫 you", add_special_tokens=False)
    delta = stream_of().push(
        RequestOutput(request_id="x", token_ids=token_ids, finish_reason="length")
    )
    pieces, whole = stream_of(), ""
    for token_id, offset in zip(token_ids, delta.text_offsets, strict=True):
        assert offset == len(whole)
        whole += pieces.push(RequestOutput(request_id="x", token_ids=[token_id])).text
    assert whole == delta.text == "Hello, 叫 you"


@pytest.mark.parametrize("text", ["a🎉b", "e\u0301 叫é", "🎉🎉", "日本 \ufffd!", "éa"])
@pytest.mark.parametrize("is_byte_level", [True, False])
def test_offsets_count_characters_where_tokens_are_parts_of_them(
    text: str, is_byte_level: bool, sentencepiece: Tokenizer
) -> None:
    tokenizer = byte_level() if is_byte_level else sentencepiece
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(token_ids)
    num_bytes = [len(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    expected = [
        len(text.encode()[: sum(num_bytes[:index])].decode(errors="ignore"))
        for index in range(len(token_ids))
    ]
    output = RequestOutput(request_id="x", token_ids=token_ids, finish_reason="length")
    assert TextStream(tokenizer, SamplingParams()).push(output).text_offsets == expected
    assert prompt_offsets(tokenizer, token_ids, skip_special_tokens=True) == expected
    assert tokenizer.text_offsets(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("text", ["a🎉b", "🎉🎉日本語é", "日本 ü🎉b", "éaüüüüüü🎉"])
@pytest.mark.parametrize("is_byte_level", [True, False])
def test_a_prompt_may_end_anywhere_in_a_character(
    text: str, is_byte_level: bool, sentencepiece: Tokenizer
) -> None:
    tokenizer = byte_level() if is_byte_level else sentencepiece
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(token_ids)
    num_bytes = [len(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    before = [
        len(text.encode()[: sum(num_bytes[:index])].decode(errors="ignore"))
        for index in range(len(token_ids))
    ]
    for cut in range(len(token_ids)):
        output = RequestOutput(request_id="x", token_ids=token_ids[cut:], finish_reason="length")
        delta = TextStream(tokenizer, SamplingParams(), token_ids[:cut]).push(output)
        assert delta.text == text[before[cut] :], cut
        assert delta.text_offsets == [offset - before[cut] for offset in before[cut:]], cut
        prompt = tokenizer.decode(token_ids[:cut])
        assert settled_text(tokenizer, token_ids[:cut], prompt) == text[: before[cut]], cut


def test_a_whole_replacement_character_of_the_prompt_is_not_repeated() -> None:
    prompt = byte_level().encode("a\ufffd", add_special_tokens=False)
    after = byte_level().encode("b", add_special_tokens=False)
    assert "".join(streamed(byte_level(), after, prompt)) == "b"
    begun = byte_level().encode("🎉", add_special_tokens=False)
    assert "".join(streamed(byte_level(), begun[2:], [*prompt, *begun[:2]])) == "🎉"


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    parts=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_where_it_stops_does_not_depend_on_how_the_text_is_cut(
    stops: list[str], parts: list[str]
) -> None:
    text = "".join(parts)
    shown, stop = scan(stops, parts)
    assert (shown, stop) == scan(stops, list(text)) == scan(stops, [text])
    ends = [text.find(each) + len(each) for each in stops if each in text]
    if ends:
        first = text[: min(ends)]
        assert first == shown + str(stop)
        assert stop == max((each for each in stops if first.endswith(each)), key=len)
    else:
        assert (shown, stop) == (text, None)


def scan(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = ""
    for part in parts:
        more, stop = scanner.push(part)
        shown += more
        if stop is not None:
            return shown, stop
    return shown + scanner.flush(), None


def texts_of(
    params: SamplingParams, tokens: Sequence[int], **end: Any
) -> tuple[list[str], TextDelta]:
    """The text of each delta, a token at a time, and the last delta."""
    stream = TextStream(byte_level(), params)
    deltas = []
    for place, token in enumerate(tokens):
        is_last = place == len(tokens) - 1
        deltas.append(
            stream.push(
                RequestOutput(request_id="r", token_ids=[token], **(end if is_last else {}))
            )
        )
        if deltas[-1].finish_reason is not None:
            break
    return [delta.text for delta in deltas], deltas[-1]


def test_special_tokens_are_shown_where_they_are_not_to_be_skipped() -> None:
    eos = min(byte_level().eos_token_ids)
    tokens = [
        *byte_level().encode("we are", add_special_tokens=False),
        eos,
        *byte_level().encode(" open", False),
        eos,
    ]
    end = {"finish_reason": "stop", "stop_token_id": eos}
    shown = byte_level().decode(tokens[:-1], skip_special_tokens=False)
    for ends_shown, whole in (
        (False, shown),
        (True, byte_level().decode(tokens, skip_special_tokens=False)),
    ):
        params = SamplingParams(
            skip_special_tokens=False, include_stop_str_in_output=ends_shown, ignore_eos=True
        )
        assert "".join(texts_of(params, tokens, **end)[0]) == whole
    hidden = SamplingParams(include_stop_str_in_output=True)
    assert "".join(texts_of(hidden, tokens, **end)[0]) == byte_level().decode(tokens)


@pytest.mark.parametrize(("is_shown", "text"), [(False, "we are "), (True, "we are op")])
def test_a_stop_string_is_part_of_the_text_where_it_is_asked_for(is_shown: bool, text: str) -> None:
    tokens = byte_level().encode("we are open", add_special_tokens=False)
    params = SamplingParams(stop=("op",), include_stop_str_in_output=is_shown)
    found, last = texts_of(params, tokens)
    assert ("".join(found), last.finish_reason, last.stop_reason) == (text, "stop", "op")


def test_a_shown_stop_token_has_its_text() -> None:
    tokens = byte_level().encode("we are open", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=(tokens[-1],), include_stop_str_in_output=True)
    found, last = texts_of(params, tokens, finish_reason="stop", stop_token_id=tokens[-1])
    assert ("".join(found), last.stop_reason) == ("we are open", tokens[-1])


@pytest.mark.parametrize("min_tokens", range(9))
def test_a_stop_string_that_is_complete_before_min_tokens_does_not_count(min_tokens: int) -> None:
    tokens = [byte_level().encode(letter, add_special_tokens=False)[-1] for letter in "abcabxabc"]
    ends = [place + 1 for place in range(len(tokens)) if place in (2, 8)]
    params = SamplingParams(stop=("abc", "zabcz"), min_tokens=min_tokens)
    found, last = texts_of(params, tokens)
    num_tokens = next(end for end in ends if end > min_tokens)
    assert ("".join(found), last.stop_reason) == ("abcabxabc"[: num_tokens - 3], "abc")
