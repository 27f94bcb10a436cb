import pytest

from dynamo_megatron.reports.page.token_texts import WINDOW, find_decoder, token_texts


def of_bytes(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_stands_at_the_last():
    text = "aé€😀b"
    pieces = token_texts(list(text.encode()), of_bytes)
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def test_bytes_that_never_become_a_character_are_shown():
    pieces = token_texts([*b"ab", 0xF0, 0x9F], of_bytes)
    assert pieces == ["a", "b", "", "\ufffd"] and token_texts([], of_bytes) == []


@pytest.mark.parametrize("text", ["é€😀" * 9, "\ufffd" * 60, "a"])
@pytest.mark.parametrize("broken", [b"\x80" * 997, b"\xf0\x9f\x98" * 300, bytes(range(0x80, 0x100)) * 8])
def test_broken_bytes_take_time_in_proportion_and_no_text_is_lost(text, broken):
    given, ids = [], [*broken, *text.encode(), *broken]

    def decode(part) -> str:
        given.append(len(part))
        return of_bytes(part)

    pieces = token_texts(ids, decode)
    assert "".join(pieces) == of_bytes(ids) and len(pieces) == len(ids)
    assert max(given) <= 2 * WINDOW and sum(given) < 80 * len(ids)


@pytest.mark.parametrize("before", range(20))
@pytest.mark.parametrize("character", [[b"\xf0", b"\x9f", b"\x98", b"\x80"], [b"\xf0\x9f", b"\x98\x80\x80"]])
def test_a_character_among_broken_bytes_is_not_cut(before, character):
    tokens = [b"\x80"] * before + character + [b"\x80"] * 20
    pieces = token_texts(range(len(tokens)), lambda ids: of_bytes(b"".join(tokens[i] for i in ids)))
    assert "".join(pieces) == of_bytes(b"".join(tokens))


def test_tokens_without_a_text_take_time_in_proportion():
    given = []
    assert token_texts([7] * 999, lambda ids: given.append(len(ids)) or "") == [""] * 999
    assert max(given) <= 2 * WINDOW


def test_a_decoder_that_drops_the_first_blank():
    """As tokenizers with word-initial blanks do: every piece but the first keeps its own."""

    def decode(ids) -> str:
        return "".join(f" w{i}" for i in ids)[1:]

    assert token_texts([1, 2, 3], decode) == ["w1", " w2", " w3"]


@pytest.mark.parametrize("where", ["model.path", "hf", "nowhere"])
def test_where_the_tokenizer_is_found(tiny_model, tmp_path, where):
    (tmp_path / "run").mkdir()
    if where == "hf":
        (tmp_path / "run" / "hf").symlink_to(tiny_model)
    decode = find_decoder(tmp_path / "run", str(tiny_model if where == "model.path" else tmp_path / "gone"))
    if where == "nowhere":
        assert decode is None
    else:
        ids = list(range(5, 15))
        assert "".join(token_texts(ids, decode)) == decode(ids)
