"""A vision transformer small enough that tests wait for imports only."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a two-layer SigLIP vision tower for images of 32 x 32."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    transformers.SiglipVisionModel(config).save_pretrained(directory)
    return directory
