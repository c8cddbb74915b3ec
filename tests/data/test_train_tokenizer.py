"""Training a tokenizer: Llama-2's settings, text that survives, the same file every time, clear refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_simple.data.tokenizer import load_tokenizer
from megatron_simple.data.tokenizer_training import TrainingSettings, train_tokenizer

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
TOOL = Path(__file__).parents[2] / "tools" / "train_tokenizer.py"
CODE = "def double(values):\n    for value in values:\n        yield 2 * value  # twice\n\n\n"
KEPT = ["\n\n    def f()", "  a  b ", "\t", "", " ", "a\0b", "ﬁ ☃ 😀", "\r\n", "</s>", "2024", CODE]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": CODE + f"print({i}, 'the thing with feathers')\n"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(model: Path):
    return load_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)


def test_settings_and_round_trip(tmp_path, corpus, caplog):
    summary = train_tokenizer(TrainingSettings([corpus], tmp_path / "new" / "t", vocab_size=360))
    text_bytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.open(encoding="utf-8"))
    assert summary == {"vocab_size": 360, "documents": 40, "bytes_read": text_bytes}
    tokenizer = load(tmp_path / "new" / "t.model")
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (360, 1, 2)
    assert not caplog.records  # no warning that it changes text
    for text in KEPT:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rows = [line.rsplit("\t", 1)[0] for line in (tmp_path / "new" / "t.vocab").read_text("utf-8").split("\n")[:-1]]
    assert len(rows) == 360
    assert rows[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    learned = rows[259:]
    assert "▁▁▁▁" in learned  # indentation
    assert not any(any(c.isdigit() for c in piece) and len(piece) > 1 for piece in learned)
    assert not any("\n" in piece for piece in rows)
    assert tokenizer.encode("\n").tolist()[-1] == rows.index("<0x0A>")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["t.model", "t.vocab"]


def test_the_same_text_gives_the_same_file(tmp_path, corpus):
    half = corpus.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "halves").mkdir()
    (tmp_path / "halves" / "1.jsonl").write_text("".join(half[:20]), encoding="utf-8")
    (tmp_path / "halves" / "2.jsonl").write_text("".join(half[20:]), encoding="utf-8")
    models = []
    for i, inputs in enumerate(([corpus], [corpus], [tmp_path / "halves"])):
        train_tokenizer(TrainingSettings(inputs, tmp_path / f"t{i}", vocab_size=340))
        models.append((tmp_path / f"t{i}.model").read_bytes())
    assert models[0] == models[1] == models[2]


def test_limits_read_only_the_beginning(tmp_path, corpus):
    with corpus.open("a", encoding="utf-8") as file:
        file.write("not JSON\n")  # never reached
    few = train_tokenizer(TrainingSettings([corpus], tmp_path / "a", vocab_size=300, max_documents=7))
    assert few["documents"] == 7
    size = few["bytes_read"] // 7
    little = train_tokenizer(TrainingSettings([corpus], tmp_path / "b", vocab_size=300, sample_bytes=3 * size + 10))
    assert little["documents"] == 4


def test_long_lines_are_used(tmp_path):
    """Lines beyond the trainer's limits are cut, not dropped: a word that only they hold becomes a piece."""
    (tmp_path / "a.txt").write_text("short line\n" * 20 + "feathers " * 20_000 + "\n" + "zq" * 70_000, encoding="utf-8")
    train_tokenizer(TrainingSettings([tmp_path / "a.txt"], tmp_path / "t", vocab_size=320))
    pieces = (tmp_path / "t.vocab").read_text("utf-8")
    assert "▁feathers\t" in pieces
    assert "zqzqzqzq\t" in pieces


def test_refusals(tmp_path, corpus):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    cases = [
        ({"vocab_size": 20_000}, r"--vocab-size 20000 is too large for \d+ bytes of text, which give at most \d+"),
        ({"vocab_size": 262}, r"--vocab-size 262 is too small for the characters of the text; \d+ or more"),
        ({"vocab_size": 259}, r"--vocab-size 259 is too small: 3 special tokens and 256 bytes"),
        ({"inputs": [tmp_path / "empty.jsonl"]}, r"--input .*empty.jsonl: no text in it"),
        ({"inputs": [tmp_path / "bad.jsonl"]}, r'bad.jsonl:2: the value of "text" is a number, not a string'),
        ({"inputs": [tmp_path / "no.jsonl"]}, r"--input .*no.jsonl: no file"),
        ({"max_documents": 0}, "--max-documents 0"),
        ({"sample_bytes": -1}, "--sample-bytes -1"),
        ({"output_prefix": "x/"}, "--output x/"),
    ]
    base = {"inputs": [corpus], "output_prefix": tmp_path / "out" / "t", "vocab_size": 340}
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            train_tokenizer(TrainingSettings(**base | change))
    assert not (tmp_path / "out").exists()


def test_the_tool(tmp_path, corpus):
    command = [sys.executable, str(TOOL), "--input", str(corpus), "--output", str(tmp_path / "t"), "--vocab-size"]
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    result = subprocess.run([*command, "340"], capture_output=True, text=True, check=True, env=environment)
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["vocab_size"], summary["documents"]) == (340, 40)
    assert load(tmp_path / "t.model").vocab_size == 340
    result = subprocess.run([*command, "9999"], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith("error: --vocab-size 9999 is too large")


@pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")
def test_odd_text_survives_a_model_of_other_text(tmp_path, corpus):
    import gzip

    train_tokenizer(TrainingSettings([corpus], tmp_path / "t", vocab_size=340))
    tokenizer = load(tmp_path / "t.model")
    with gzip.open(Path(SHARED, "data", "odd.jsonl.gz")) as file:
        for line in file:
            text = json.loads(line)["text"][:20_000]
            assert tokenizer.decode(tokenizer.encode(text)) == text
