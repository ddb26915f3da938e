"""Small models with random weights for tests that need a server but no sense."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, ensure_demo_model

REPO = Path(__file__).resolve().parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_tiny_llama(
    directory: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    context_len: int = 4096,
    qk_norm: bool = False,
    seed: int = 0,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write a random-weight model (float32 safetensors, config, generation config, tokenizer) and return ``directory``.

    The same arguments give the same weights. They are drawn wider than usual (0.1), so that attention is not near
    uniform and a wrong KV row changes the output.

    Args:
        directory: made when missing.
        kv_heads: ``--tp 2`` needs both head counts to be even.
        qk_norm: RMS norms on queries and keys; the model is then a Qwen3, which is a Llama with those norms.
        tokenizer_from: a model directory; None takes (and fetches when missing) the demo model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if tokenizer_from is None:
        tokenizer_from = ensure_demo_model(REPO / DEFAULT_DEMO_MODEL)
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, directory / name)

    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        vocab_size=49152,  # the demo model's tokenizer
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context_len,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(directory)
    return directory
