"""Byte-level BPE: exact ids against the definition, special tokens by table, text of any shape."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_simple.data.merges import merges_follow_ranks
from megatron_simple.data.tokenizer import load_tokenizer
from megatron_simple.data.tokenizer_base import replace_surrogates
from tests.data.tiny_tokenizers import LETTERS, MERGES, ODD_TEXTS, write_gpt2, write_ranks

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")


def plain_bpe(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The definition: again and again, join the leftmost pair of the lowest rank."""
    rank = {pair: i for i, pair in enumerate(merges)}
    parts = [LETTERS[byte] for byte in word.encode()]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)))
        if (parts[best], parts[best + 1]) not in rank:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


class TestGPT2:
    @pytest.mark.parametrize("shuffled", [False, True])
    def test_ids_are_those_of_the_merges(self, tmp_path, shuffled):
        flags = write_gpt2(tmp_path, shuffled=shuffled)
        vocabulary = json.loads(Path(flags["vocab_file"]).read_text(encoding="utf-8"))
        tokenizer = load_tokenizer(**flags)
        words = ["hello", " world", "  ", " hello"]  # GPT-2's pattern cuts "hello world   hello" so
        expected = [vocabulary[part] for word in words for part in plain_bpe(word, MERGES)]
        assert tokenizer.encode("hello world   hello").tolist() == expected
        assert tokenizer.encode("x").dtype == np.int32
        assert tokenizer.eod == vocabulary["<|endoftext|>"]
        assert tokenizer.bos is None
        assert tokenizer.vocab_size == max(vocabulary.values()) + 1

    def test_text_survives_and_markers_are_text(self, tmp_path):
        tokenizer = load_tokenizer(**write_gpt2(tmp_path, shuffled=True))
        for text in ODD_TEXTS:
            ids = tokenizer.encode(text)
            assert tokenizer.eod not in ids
            assert tokenizer.decode(ids) == replace_surrogates(text)[0]
        assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"

    @pytest.mark.parametrize("seed", range(20))
    def test_random_merges_are_exact(self, tmp_path, seed):
        """Lists of merges at random are often irregular; then the general engine must take over."""
        rng = np.random.default_rng(seed)
        merges: list[tuple[str, str]] = []
        tokens = list("abc")
        for _ in range(12):
            pair = (str(rng.choice(tokens)), str(rng.choice(tokens)))
            if pair not in merges and len("".join(pair)) < 8:
                merges.append(pair)
                tokens.append("".join(pair))
        flags = write_gpt2(tmp_path, merges, shuffled=bool(seed % 2))
        vocabulary = json.loads(Path(flags["vocab_file"]).read_text(encoding="utf-8"))
        tokenizer = load_tokenizer(**flags)
        reachable = all(plain_bpe(a + b, merges) == [a + b] for a, b in merges)
        unique = len({a + b for a, b in merges}) == len(merges)
        assert merges_follow_ranks(merges) == (reachable and unique)
        for _ in range(60):
            word = "".join(rng.choice(list("abc"), size=rng.integers(1, 14)))
            assert tokenizer.encode(word).tolist() == [vocabulary[part] for part in plain_bpe(word, merges)]

    def test_the_random_lists_are_of_both_kinds(self):
        assert merges_follow_ranks([("a", "b"), ("ab", "c")])
        assert not merges_follow_ranks([("a", "b"), ("b", "c"), ("a", "bc")])  # "abc" is always ab, c
        assert not merges_follow_ranks([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")])  # built twice
        assert not merges_follow_ranks([("a", "a"), ("a", "aa")])  # of "aaa" the left pair is joined first
        assert merges_follow_ranks([("a", "a"), ("aa", "a"), ("aa", "aa")])

    def test_wrong_files(self, tmp_path):
        flags = write_gpt2(tmp_path)
        short = tmp_path / "short.txt"
        short.write_text("#version: 0.2\nh e\nhe r\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"--merge-file .*short.txt:3: .*different tokenizers"):
            load_tokenizer(**{**flags, "merge_file": str(short)})
        with pytest.raises(ValueError, match="--vocab-file .* GPT-2 merges file"):
            load_tokenizer(**{**flags, "vocab_file": flags["merge_file"]})
        with pytest.raises(ValueError, match="--merge-file .* GPT-2 vocabulary"):
            load_tokenizer(**{**flags, "merge_file": flags["vocab_file"]})
        with pytest.raises(ValueError, match="needs --merge-file"):
            load_tokenizer(**{**flags, "merge_file": None})
        lacking = tmp_path / "lacking.json"
        lacking.write_text(json.dumps({"a": 0}))
        (tmp_path / "none.txt").write_text("#version: 0.2\n")
        with pytest.raises(ValueError, match="all 256 are needed"):
            load_tokenizer(**{**flags, "vocab_file": str(lacking), "merge_file": str(tmp_path / "none.txt")})


class TestTik:
    def test_ids_and_special_tokens(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.tiktoken")
        tokenizer = load_tokenizer(tokenizer_type="TikTokenizer", tokenizer_model=ranks, tiktoken_pattern="llama3")
        assert tokenizer.encode("hello hell").tolist() == [259, 32, 258]
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (260, 261, 516)
        assert tokenizer.decode([260, 259, 269]) == "<|begin_of_text|>hello<|eot_id|>"
        assert tokenizer.decode([515]) == "<|reserved_special_token_250|>"
        for text in ODD_TEXTS:
            ids = tokenizer.encode(text)
            assert ids.size == 0 or ids.max() < 260
            assert tokenizer.decode(ids) == replace_surrogates(text)[0]
        with pytest.raises(ValueError, match="token id 999"):
            tokenizer.decode([999])

    @pytest.mark.parametrize(("pattern", "bos", "eod", "size"), [("gpt2", None, 260, 261), ("cl100k", None, 261, 281)])
    def test_other_patterns(self, tmp_path, pattern, bos, eod, size):
        ranks = write_ranks(tmp_path / "ranks.tiktoken")
        tokenizer = load_tokenizer(tokenizer_type="TikTokenizer", tokenizer_model=ranks, tiktoken_pattern=pattern)
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (bos, eod, size)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tokenizer.decode([-1])

    def test_pattern_cuts_text(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.tiktoken", (b"12", b"123", b"1234"))
        ids = {}
        file = tmp_path / "pattern.json"
        file.write_text(json.dumps({"pattern": r"\d\d|\D|\d"}))
        for pattern in ("gpt2", "llama3", "cl100k", str(file)):
            tokenizer = load_tokenizer(tokenizer_type="TikTokenizer", tokenizer_model=ranks, tiktoken_pattern=pattern)
            ids[pattern] = tokenizer.encode("1234").tolist()
        assert ids == {"gpt2": [258], "llama3": [257, 52], "cl100k": [257, 52], str(file): [256, 51, 52]}
        assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (259, 260, 261)
        assert set(tokenizer.files) == {"tokenizer_model", "tiktoken_pattern"}

    @pytest.mark.parametrize("pattern", ["llama3", "gpt2", "cl100k"])
    def test_a_million_characters_without_a_break(self, tmp_path, pattern):
        """tiktoken itself panics on the runs of whitespace; where it does not, both ways must agree."""
        ranks = write_ranks(tmp_path / "ranks.tiktoken", (b"  ", b"    ", b"aa", b"aaaa"))
        tokenizer = load_tokenizer(tokenizer_type="TikTokenizer", tokenizer_model=ranks, tiktoken_pattern=pattern)
        for run in (" ", "\t", "a", "\n", "1", "!", "人"):
            text = "x" + run * 1_000_000 + "x"
            assert tokenizer.decode(tokenizer.encode(text)) == text
        for run in (" ", " \n", "\t "):
            text = "say, it!" + run * 150_000 + "don't\n" + "12345 " * 20
            assert np.array_equal(tokenizer.encode(text), tokenizer._bpe.encode_ordinary(text))

    def test_damaged_rank_files(self, tmp_path):
        ranks = write_ranks(tmp_path / "ranks.tiktoken")
        data = ranks.read_bytes()
        flags = {"tokenizer_type": "TikTokenizer", "tokenizer_model": ranks, "tiktoken_pattern": "llama3"}
        ranks.write_bytes(data[:-2])  # the last rank loses a digit
        with pytest.raises(ValueError, match="cut short"):
            load_tokenizer(**flags)
        ranks.write_bytes(data[:-6])  # the last line ends after its token
        with pytest.raises(ValueError, match=r"ranks.tiktoken:260: not a base64 token"):
            load_tokenizer(**flags)
        ranks.write_bytes(data[:1000])
        with pytest.raises(ValueError, match="damaged|not a base64"):
            load_tokenizer(**flags)
        with pytest.raises(ValueError, match="needs --tiktoken-pattern"):
            load_tokenizer(**{**flags, "tiktoken_pattern": None})
        with pytest.raises(ValueError, match="neither a file nor one of llama3, gpt2, cl100k"):
            load_tokenizer(**{**flags, "tiktoken_pattern": "llama4"})


@pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")
def test_the_real_gpt2():
    folder = Path(SHARED, "tokenizers")
    tokenizer = load_tokenizer(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=folder / "gpt2-vocab.json",
        merge_file=folder / "gpt2-merges.txt",
    )
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]  # known from GPT-2 itself
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)
    import tokenizers

    engine = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt"))
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    with Path(SHARED, "data", "c4-1000.jsonl").open(encoding="utf-8") as file:
        for line in list(file)[:100]:
            text = json.loads(line)["text"]
            assert tokenizer.encode(text).tolist() == engine.encode(text).ids
