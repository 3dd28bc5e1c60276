"""For all tests: the ``gpu`` marker, hypothesis without deadlines, a pool of ranks, tiny checkpoints and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks

from fodit.testing.tiny import make

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run the GPU tests with pytest alone
    pass
else:
    # Wall-clock limits on single examples say nothing on a shared machine. The rest stays as it is.
    settings.register_profile("fodit", settings(), deadline=None)
    settings.load_profile("fodit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip a test marked ``gpu`` where there is no CUDA device. Ranks share a device where there are too few."""
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """Four processes that stand in for ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of the tiny checkpoint of a kind, made once."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> str:
        path = root / kind
        return str(path if path.exists() else make(kind, path))

    return folder


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The step benchmark with small models and no GPU."""
    from benches import on_cpu

    on_cpu(monkeypatch)
    return monkeypatch
