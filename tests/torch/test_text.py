"""Streamed text against whole decodes: nothing is shown that later tokens change, nothing of a stop
string."""

from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coserve.engine.text import TextStream

CORPUS = [
    "Hello world, hello there.",
    "the cat's 12 hats are in the house",
    "你好 世界 🙂👍🏽",
    "naïve cafe\u0301",
] * 3
TEXTS = [
    "Hello world, the cat.",
    " two  spaces\n\nand a tab\t.",
    "你好，世界",
    "🙂👩‍👩‍👧🇩🇪👍🏽",
    "cafe\u0301 naïve a\u0308\u0323",
    "\ufffd is a character, too \ufffd",
]
SPECIAL = "<|end|>"


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: tokens are any bytes, also parts of several characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: words with their space, bytes for characters that are not in the
    vocabulary."""
    words = ["▁", "▁the", "▁cat", "▁Hello", "▁hello", "he", "the", "▁a", "ll", "▁t", "好", "▁▁"]
    letters = [chr(code) for code in range(33, 127)]
    names = dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)] + words + letters)
    vocab = {name: token for token, name in enumerate(["<unk>", *names])}
    merges = [("▁", "t"), ("h", "e"), ("l", "l"), ("▁", "a"), ("t", "he"), ("▁t", "he"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """As T5: a unigram model whose decoder drops the first word's space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = [byte_level, sentencepiece, metaspace]


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int], **kwargs
) -> list[str]:
    """Pieces as they come, up to a stop string; the last is what `finish` gives."""
    stream, pieces = TextStream(tokenizer, prompt, **kwargs), []
    for token in output:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """What is before the stop string that is complete first, by trying every end."""
    for end in range(len(text) + 1):
        if hits := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, hits))]
    return text


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text_wherever_the_prompt_ends(make, text):
    tokenizer = make()
    tokens = ids(tokenizer, text)
    whole = decoded(tokenizer, tokens)
    for end in range(len(tokens) + 1):
        before = decoded(tokenizer, tokens[:end])
        if whole.startswith(before):  # the prompt does not end within a character
            assert before + "".join(streamed(tokenizer, tokens[:end], tokens[end:])) == whole


def test_what_is_shown_needs_no_later_token():
    """A character comes with its last byte, neither earlier nor later."""
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        "é🙂a"
    )[0][0]
    single = [tokenizer.convert_tokens_to_ids(letter) for letter in letters]
    assert streamed(tokenizer, [], single) == ["", "é", "", "", "", "🙂", "a", ""]
    tokenizer = sentencepiece()
    bytes_of = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é🙂".encode()]
    assert streamed(tokenizer, [], bytes_of) == ["", "é", "", "", "", "🙂", ""]
    assert streamed(tokenizer, ids(tokenizer, "x 🙂🙂🙂"), bytes_of) == [
        "",
        "é",
        "",
        "",
        "",
        "🙂",
        "",
    ]


def test_a_character_that_is_never_finished_is_replaced_at_the_end():
    tokenizer = sentencepiece()
    tokens = ids(tokenizer, "a cat 🙂")[:-1]
    assert streamed(tokenizer, [], tokens)[-1] == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_spaces_between_words_survive_special_and_unknown_tokens(make):
    """Special tokens, and ids that only the model has, neither show nor cost the next word its
    space."""
    tokenizer = make()
    end = tokenizer.convert_tokens_to_ids(SPECIAL)
    the, cat = ids(tokenizer, "the"), ids(tokenizer, " cat")
    silent = [end, len(tokenizer) + 3] * 9
    assert (
        "".join(streamed(tokenizer, [*the, *silent], [*silent, *cat, *silent, *cat])) == " cat cat"
    )
    shown = streamed(tokenizer, the, [end, *cat], skip_special_tokens=False)
    assert "".join(shown) == tokenizer.decode([*the, end, *cat])[len("the") :]


def test_bytes_that_never_make_a_character_are_replaced_as_the_decoder_does():
    tokenizer = byte_level()
    first, next_byte = (
        tokenizer.convert_tokens_to_ids(token) for token in "ðŁ"
    )  # F0 and 9F, how emoji begin
    for count in range(1, 6):
        for tokens in product((first, next_byte), repeat=count):
            assert "".join(streamed(tokenizer, [], [*tokens, *ids(tokenizer, "é")])) == decoded(
                tokenizer, [*tokens, *ids(tokenizer, "é")]
            )
            assert "".join(streamed(tokenizer, [], list(tokens))) == decoded(
                tokenizer, list(tokens)
            )


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 379), max_size=40), split=st.integers(0, 5), data=st.data())
def test_any_bytes_make_up_the_decoders_text_up_to_a_stop_string(tokens, split, data):
    tokenizer = byte_level()
    prompt, output = ids(tokenizer, "Hello 你好")[:split], tokens
    prompt = prompt if not decoded(tokenizer, prompt).endswith("\ufffd") else []
    text = decoded(tokenizer, prompt + output)[len(decoded(tokenizer, prompt)) :]
    strings = data.draw(stop_strings(text))
    assert "".join(streamed(tokenizer, prompt, output, stop=strings)) == cut_at_stop(text, strings)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 300) | st.sampled_from([0xE6, 0xA6, 0xBE]), max_size=20))
def test_byte_fallback_takes_nothing_back(tokens):
    """Where the decoder would (bytes that are no UTF-8 spoil the characters before them), what was
    shown stays.

    Tokens are bytes plus one; the three that come often are those of 好.
    """
    tokenizer = sentencepiece()
    whole, pieces = decoded(tokenizer, tokens), streamed(tokenizer, [], tokens)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole
    letters = [c for c in whole if c != "\ufffd"]
    shown = iter("".join(pieces))
    assert all(letter in shown for letter in letters), "in the same order, with nothing missing"


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " cat", "好", "🙂", " ", "e\u0301", "aa", "\n", "你"])),
    data=st.data(),
)
def test_any_text_of_sentencepiece_tokens_up_to_a_stop_string(words, data):
    for make in (sentencepiece, metaspace):
        tokenizer = make()
        tokens = ids(tokenizer, "".join(words))
        text = decoded(tokenizer, tokens)
        strings = data.draw(stop_strings(text))
        assert "".join(streamed(tokenizer, [], tokens, stop=strings)) == cut_at_stop(text, strings)


def stop_strings(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Parts of the text, and letters that repeat: most begin somewhere, some are there."""
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    parts = places.map(lambda place: text[place[0] : place[0] + place[1]])
    return st.lists(parts | st.text("ae 🙂", min_size=1, max_size=4), max_size=3).map(
        lambda strings: tuple(s for s in strings if s and "\ufffd" not in s)
    )


def test_a_stop_string_is_held_back_until_it_is_decided():
    tokenizer = sentencepiece()
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "xabaabcy"]
    stream = TextStream(tokenizer, [], stop=("abc",))
    assert [stream.push(token) for token in tokens[:6]] == ["x", "", "", "ab", "a", ""]
    assert stream.stopped is None and stream.text == "xaba"
    assert stream.push(tokens[6]) == "" and stream.stopped == "abc" and stream.text == "xaba"
    assert stream.finish() == "" and stream.text == "xaba"
    assert streamed(tokenizer, [], tokens[:6], stop=("abc",))[-1] == "ab", (
        "no more came: it was none"
    )


def test_a_stop_string_ends_the_text_in_the_middle_of_a_token():
    tokenizer = byte_level()
    tokens = ids(tokenizer, "Hello world")
    assert any(len(tokenizer.decode([token])) > 3 for token in tokens)
    for stop in ("ello", "o w", "H", "rld"):
        assert (
            "".join(streamed(tokenizer, [], tokens, stop=(stop,))) == "Hello world".split(stop)[0]
        )


def test_nothing_follows_a_stop_string_not_even_a_character_that_has_begun():
    tokenizer = byte_level()
    # E0, A1, and 82 together with F0 9F: the end of a character and the start of another.
    tokens = [tokenizer.convert_tokens_to_ids(token) for token in ("à", "¡", "ĤðŁ")]
    assert streamed(tokenizer, [], tokens) == ["", "", "\u0842", "\ufffd"]
    assert streamed(tokenizer, [], tokens, stop=("\u0842",)) == ["", "", "", ""]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(("abcde", "cd"), ("ab", "cd")), (("bc", "abc"), ("", "abc")), (("zz", "e"), ("abcd", "e"))],
)
def test_of_several_stop_strings_the_first_to_be_complete_ends_the_text(stop, expected):
    """Whether the text comes letter by letter or in one token."""
    tokenizer = sentencepiece()
    tokenizer.add_tokens("abcde")
    for tokens in ([tokenizer.convert_tokens_to_ids(c) for c in "abcde"], ids(tokenizer, "abcde")):
        stream = TextStream(tokenizer, [], stop=stop)
        for token in tokens:
            if stream.stopped is None:
                stream.push(token)
        assert (stream.text, stream.stopped) == expected


def test_stop_strings_pass_below_min_tokens():
    tokenizer = sentencepiece()
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "abababc"]
    stream = TextStream(tokenizer, [], stop=("aba",))
    shown = [stream.push(token, may_stop=False) for token in tokens[:2]]
    assert shown == ["a", "b"], "nothing is held back"
    for token in tokens[2:5]:
        stream.push(token)
    assert (stream.stopped, stream.text) == ("aba", "ab"), "not the match that began before"
    stream = TextStream(tokenizer, [], stop=("bc",))
    stream.push(tokens[1])
    assert stream.text == "" and stream.push(tokens[6], may_stop=False) == "bc", (
        "what was held back counts as shown"
    )


@pytest.mark.parametrize("word", [" the", "🙂", "\ufffd", SPECIAL, "é"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_work_for_a_token_does_not_grow(make, word, monkeypatch):
    """Also where no token ever gives text that is whole."""
    tokenizer = make()
    lengths, decode = [], PreTrainedTokenizerFast.decode

    def counted(self, tokens, **kwargs):
        lengths.append(len(tokens))
        return decode(self, tokens, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", counted)
    once = ids(tokenizer, word)
    for tokens in (once * 100, once[:1] * 100, once[-1:] * 100):
        stream = TextStream(tokenizer, tokens[:1] * 1000, stop=("aaaa",))
        for token in tokens:
            stream.push(token)
        assert len(lengths) <= 5 + 3 * len(tokens) and max(lengths, default=0) <= 13
        lengths.clear()
