"""An exported folder is enough: with its own Python files and without this package, or with the package and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_simple.checkpoint.export import ExportSettings, export
from megatron_simple.checkpoint.huggingface import load_model
from megatron_simple.checkpoint.logits_check import native_logits, probe_tokens
from megatron_simple.checkpoint.reader import CheckpointReader
from tests.checkpoint.models import native_checkpoint, small_config

PROGRAM = """
import sys
sys.modules["megatron_simple"] = None  # any import of it fails
import torch
from transformers import AutoModel, AutoModelForCausalLM
tokens = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    base = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model(tokens).logits, folder + "/logits.pt")
        assert base(tokens).last_hidden_state.shape[:2] == tokens.shape
    model.save_pretrained(folder + "/resaved")
    again = AutoModelForCausalLM.from_pretrained(folder + "/resaved", trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        assert again(tokens).logits.equal(model(tokens).logits)
print("done")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Folder and the training model's logits of a custom model on either backbone."""
    root = tmp_path_factory.mktemp("exported")
    made = {}
    for backbone in ("llama3", "nanogpt"):
        checkpoint = native_checkpoint(root / f"{backbone}-native", small_config(backbone=backbone))
        export(ExportSettings(str(checkpoint), str(root / backbone), verify=False), say=lambda text: None)
        with CheckpointReader(checkpoint) as reader:
            made[backbone] = (root / backbone, native_logits(reader, probe_tokens(reader.config.model)))
    return made


def test_without_the_package(tmp_path: Path, exported: dict) -> None:
    tokens = tmp_path / "tokens.pt"
    torch.save(probe_tokens(small_config().model), tokens)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    folders = [str(folder) for folder, _ in exported.values()]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tokens), *folders],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for folder, logits in exported.values():
        assert (torch.load(folder / "logits.pt") - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("backbone", ["llama3", "nanogpt"])
def test_with_the_package_and_without_the_files(exported: dict, backbone: str) -> None:
    folder, logits = exported[backbone]
    files = sorted(folder.glob("*.py"))
    assert [path.name.split("_")[0] for path in files] == ["configuration", "modeling"]
    hidden = {path: path.read_bytes() for path in files}
    try:
        for path in files:
            path.unlink()
        model = load_model(folder, dtype=torch.float32)
        with torch.no_grad():
            difference = (model(probe_tokens(small_config().model)).logits - logits).abs().max()
        assert difference <= 1e-5 * logits.abs().max()
    finally:
        for path, content in hidden.items():
            path.write_bytes(content)
