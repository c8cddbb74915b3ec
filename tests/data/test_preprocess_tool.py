"""tools/preprocess_data.py as a process: its last line, its errors, and what a stopped run leaves: nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.tiny_tokenizers import write_gpt2

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return write_gpt2(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "P"


class TestTool:
    @pytest.fixture
    def command(self, tmp_path, out, flags) -> list[str]:
        given = [[f"--{name.replace('_', '-')}", value] for name, value in flags.items()]
        tool = [sys.executable, str(TOOL), "--output-prefix", str(out), *sum(given, [])]
        return [*tool, "--input", str(tmp_path / "a.jsonl")]

    @staticmethod
    def run(command: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment())

    def test_summary_is_the_last_line(self, tmp_path, out, command):
        write_lines(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": ""}])
        result = self.run([*command, "--append-eod", "--workers", "2"])
        assert result.returncode == 0, result.stderr
        summary = json.loads(result.stdout.splitlines()[-1])
        assert {"documents": 1, "tokens": 2, "skipped": 0, "empty": 1, "bytes_read": 31}.items() <= summary.items()
        assert summary["seconds"] > 0
        assert "eod 265 appended" in result.stderr

    def test_errors_are_one_sentence(self, tmp_path, out, command):
        write_lines(tmp_path / "a.jsonl", [{"text": "hello"}, {"content": "x"}])
        for extra, message in (
            ([], f'error: {tmp_path / "a.jsonl"}:2: no key "text"'),
            (["--tokenizer-type", "TikTokenizer"], "error: --tokenizer-type TikTokenizer needs --tokenizer-model FILE"),
            (["--input", "none/*.jsonl"], "error: --input none/*.jsonl: no file"),
        ):
            result = self.run([*command, *extra])
            assert result.returncode == 1
            assert result.stderr.splitlines()[-1].startswith(message)
            assert "Traceback" not in result.stderr
            assert names_in(out.parent) == []

    @pytest.mark.parametrize("tool", ["preprocess_data.py", "train_tokenizer.py"])
    def test_help(self, tool):
        result = self.run([sys.executable, str(TOOL.with_name(tool)), "--help"])
        assert result.returncode == 0
        assert "--input PATH [PATH ...]" in result.stdout

    def test_no_torch_on_this_road(self):
        code = "import sys, megatron_simple.data.preprocess, megatron_simple.data.byte_bpe; print('torch' in sys.modules)"
        assert self.run([sys.executable, "-c", code]).stdout == "False\n"

    @pytest.mark.parametrize("victim", ["worker", "terminate", "interrupt"])
    def test_a_run_that_is_stopped(self, tmp_path, out, command, victim):
        """Kill a worker, or end the parent, in the middle: quickly over, not a success, and nothing left."""
        row = json.dumps({"text": "hello world, " * 800}).encode() + b"\n"
        with (tmp_path / "a.jsonl").open("wb") as file:
            for _ in range(100):
                file.write(row * 100)  # 104 MB in all: many seconds of work
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
        settings["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
        process = subprocess.Popen([*command, "--workers", "2"], **settings)
        workers = wait_for_workers(process.pid, Path(f"{out}.partial"))
        sent = time.monotonic()
        target, sign = {
            "worker": (workers[-1], signal.SIGKILL),
            "terminate": (process.pid, signal.SIGTERM),
            "interrupt": (process.pid, signal.SIGINT),
        }[victim]
        os.kill(target, sign)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - sent < 5
        assert process.returncode == {"worker": 1, "terminate": 143, "interrupt": 130}[victim]
        if victim == "worker":
            assert f"(process {target}) was killed by signal 9 while it worked on {tmp_path / 'a.jsonl'}" in errors
        assert "Traceback" not in errors
        assert names_in(out.parent) == []
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def environment() -> dict[str, str]:
    """This environment with the package's own folder in front, so that an installation is not needed."""
    return os.environ | {"PYTHONPATH": str(TOOL.parents[1]), "OMP_NUM_THREADS": "1"}


def wait_for_workers(parent: int, partial: Path) -> list[int]:
    """Process ids of the two workers once both have begun to write."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        workers = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(workers) == 2 and len(list(partial.glob("*.bin"))) >= 2:
            return workers
        time.sleep(0.05)
    raise AssertionError("the workers did not begin in time")
