"""The dataset of the runs that the tests here start."""

from __future__ import annotations

import pytest

from tests.data.dataset_files import write_dataset


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten samples of 16 tokens for six steps of four: two epoch borders lie inside the run, one on a step's border."""
    prefix = tmp_path_factory.mktemp("data") / "train"
    write_dataset(prefix, [[(i * 31 + j * j) % 250 for j in range(20)] for i in range(9)])
    return str(prefix)
