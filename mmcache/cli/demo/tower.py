"""The encoder of the demo: a vision transformer that gives the same bits for the same photograph in every process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from mmcache.cli.demo.checkpoint import Checkpoint, Family
from mmcache.cli.demo.errors import DemoError
from mmcache.cli.plurals import counted
from mmcache.key import EmbeddingKey, EncoderFingerprint

if TYPE_CHECKING:
    from PIL import Image

SEED: Final = 20_240_607
THREADS: Final = 1
"""Sums are split by thread, so the number of threads is a part of the result."""

_NORMALIZATION: Final[dict[Family, tuple[list[float], list[float]]]] = {
    "siglip": ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    "clip": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
}
"""Mean and standard deviation by channel, as the families' processors have them."""


class VisionTower:
    """SigLIP base with 16-pixel patches and seeded random weights, or a local checkpoint of SigLIP or CLIP.

    Photographs are resized to the tower's square (bicubic) and encoded one at a time, in float32. Building one sets the
    number of torch's threads in this process.

    Args:
        checkpoint: None for random weights, which take no download.

    Raises:
        DemoError: the checkpoint lacks weights of the vision tower.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        torch.set_num_threads(THREADS)
        family: Family = "siglip" if checkpoint is None else checkpoint.family
        if checkpoint is None:
            torch.manual_seed(SEED)
            self._model: Any = transformers.SiglipVisionModel(transformers.SiglipVisionConfig())
            self.model_name = "siglip-base-patch16-224-random"
            weights = f"seed-{SEED}"
        else:
            self._model = _load(checkpoint)
            self.model_name = f"{family}-checkpoint"
            weights = checkpoint.digest()
        self._model.eval()
        self.image_size: int = self._model.config.image_size
        mean, std = _NORMALIZATION[family]
        self._mean = torch.tensor(mean).reshape(3, 1, 1)
        self._std = torch.tensor(std).reshape(3, 1, 1)
        self._version = EncoderFingerprint(
            weights=weights,
            dtype="float32",
            processor={"size": self.image_size, "resample": "bicubic", "mean": mean, "std": std},
            extra={"torch": str(torch.__version__), "transformers": transformers.__version__, "threads": THREADS},
        ).version

    def key(self, mm_hash: str) -> EmbeddingKey:
        """The key of what `encode` makes of the photograph with this digest."""
        return EmbeddingKey(self.model_name, self._version, mm_hash)

    def encode(self, photograph: Image.Image) -> torch.Tensor:
        """The last hidden state of every patch: float32 of shape [patches, hidden size]."""
        with torch.inference_mode():
            pixels = self._preprocess(photograph).unsqueeze(0)
            embedding: torch.Tensor = self._model(pixel_values=pixels).last_hidden_state[0]
            return embedding

    def _preprocess(self, photograph: Image.Image) -> torch.Tensor:
        from PIL import Image  # noqa: PLC0415  (an extra's dependency)

        square = photograph.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        interleaved = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
        channels = interleaved.reshape(self.image_size, self.image_size, 3).permute(2, 0, 1)
        return (channels.contiguous().float() / 255 - self._mean) / self._std


def _load(checkpoint: Checkpoint) -> Any:
    model_class: Any = transformers.SiglipVisionModel if checkpoint.family == "siglip" else transformers.CLIPVisionModel
    try:
        model, loaded = model_class.from_pretrained(
            str(checkpoint.directory), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DemoError(f"{checkpoint.directory} cannot be loaded: {error}") from error
    if missing := sorted(loaded["missing_keys"]):  # transformers would fill them with unseeded random numbers
        raise DemoError(
            f"{checkpoint.directory} lacks {counted(len(missing), 'weight')} of the tower, such as {missing[0]}"
        )
    return model.float()


def load_tower(weights: Path | None) -> VisionTower:
    """The tower for the demo's `--weights`."""
    return VisionTower(None if weights is None else Checkpoint(weights))
