"""What a request of vLLM's wants of the cache: keys and shapes, and whether this engine could encode it itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from mmcache.integrations.vllm.adapters import LoraDigests, NoDigest
from mmcache.integrations.vllm.identity import EncoderIdentity, request_key
from mmcache.integrations.vllm.item import Wanted

_log = logging.getLogger(__name__)

OURS: Final = "mmcache"
"""Our part of each item in `ec_transfer_params`."""


class Describer:
    """Describes one engine's requests.

    Args:
        identity: of its encoder.
        loras: digests of adapters.
        widths: what second dimensions a modality's embeddings may have.
        itemsize: bytes of one of their elements.
        metadata_fields: what of a modality's data is no input of the encoder.
        tenant: of requests without a `cache_salt`.
        counters: counts items that are not shared, by reason, and requests of encoders that are not like this one.
    """

    def __init__(
        self,
        identity: EncoderIdentity,
        *,
        loras: LoraDigests,
        widths: Callable[[str], tuple[int, ...]],
        itemsize: int,
        metadata_fields: Callable[[str], Collection[str]],
        tenant: str,
        counters: Counter[str],
    ) -> None:
        self._identity = identity
        self._loras = loras
        self._widths = widths
        self._itemsize = itemsize
        self._metadata_fields = metadata_fields
        self._tenant = tenant
        self._counters = counters
        self._told: set[str] = set()

    def __call__(self, request: Any) -> list[Wanted] | None:
        """A request's items, in order; None while the digest of its adapter is being computed."""
        digest = self._loras.digest(request.lora_request) if self._identity.tower_lora else None
        if digest is NoDigest.PENDING:
            return None
        self._compare(request)
        return [self._describe(feature, digest, request.cache_salt) for feature in request.mm_features]

    def can_encode(self, request: Any) -> bool:
        """Whether all of a request's items came with something for an encoder."""
        return all(_has_input(item.data, self._metadata_fields(item.modality)) for item in request.mm_features)

    def _describe(self, feature: Any, digest: str | NoDigest | None, salt: str | None) -> Wanted:
        key, reason = request_key(self._identity, feature, lora_digest=digest, cache_salt=salt, tenant=self._tenant)
        position = feature.mm_position
        rows = position.get_num_embeds()
        if key is None or rows < 1:
            key = None
            self._counters[f"not_shared.{reason or 'empty'}"] += 1
        return Wanted(
            identifier=feature.identifier,
            key=key,
            rows=rows,
            widths=self._widths(feature.modality),
            dtype=self._identity.dtype,
            itemsize=self._itemsize,
            end=position.offset + position.length,
            encodable=_has_input(feature.data, self._metadata_fields(feature.modality)),
        )

    def _compare(self, request: Any) -> None:
        """An encoder's answer came with this request: say where it cannot have been one like ours."""
        params = request.ec_transfer_params
        if not isinstance(params, dict) or not params:
            return
        theirs = next((item.get(OURS) for item in params.values() if isinstance(item, dict)), None)
        if not isinstance(theirs, dict):
            theirs = {}
        for field, mine in (("model", self._identity.model), ("version", self._identity.version)):
            other = theirs.get(field)
            if isinstance(other, str) and other != mine:
                self._tell(
                    f"other_{field}",
                    f"an encoder published embeddings of {field} {other[:256]!r}, and this engine looks for those of "
                    f"{mine!r}: nothing is shared. Give both the same --model, weights, dtype and processor",
                )
                return
        if not any(feature.identifier in params for feature in request.mm_features):
            self._tell(
                "other_identifiers",
                "an encoder's answer came with a request, and names none of its items: vLLM hashes the --model string "
                "into their identifiers, so both engines must be given the same, and the same media in the same form",
            )

    def _tell(self, what: str, message: str) -> None:
        self._counters[f"mismatch.{what}"] += 1
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s (counted as mismatch.%s, and not said again)", message, what)


def _has_input(data: Any, metadata_fields: Collection[str]) -> bool:
    """Whether an item has more than what places it in the prompt: something for an encoder."""
    if data is None:
        return False
    return any(element.data is not None for name, element in data.items() if name not in metadata_fields)
