"""What became of an entry, told to people or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import typer

from mmcache.cli.plurals import counted
from mmcache.entry import TensorSpec
from mmcache.key import EmbeddingKey


class TensorShape(msgspec.Struct, frozen=True):
    """One tensor of an entry."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields that do not apply are left out of the JSON."""

    status: str
    """`hit` or `miss`; `known` or `unknown`; `stored`, `duplicate` or `dropped`."""
    key: EmbeddingKey
    reason: str = ""
    """Why it is a miss or a drop: a word of `MMCache.stats()`."""
    detail: str = ""
    source: str = ""
    """`local` or `store`."""
    nbytes: int = 0
    """Of the payload; of a lookup, of the whole object in the store."""
    generation: int | None = None
    tensors: list[TensorShape] = []
    meta: dict[str, object] = {}
    output: str = ""
    """The file that was written."""


def shapes_of(specs: Iterable[TensorSpec]) -> list[TensorShape]:
    """The tensors of an entry's header."""
    return [TensorShape(spec.name, spec.dtype, list(spec.shape), spec.nbytes) for spec in specs]


def tell(outcome: Outcome, advice: str = "", *, as_json: bool) -> None:
    """Print it, on stdout; as text with what to do about it."""
    if as_json:
        typer.echo(msgspec.json.encode(outcome))
        return
    key = outcome.key
    typer.echo(f"{outcome.status}: {key.model} {key.version} {key.mm_hash} {_more_of(key)}")
    if outcome.reason:
        typer.echo(f"  {outcome.reason}: {outcome.detail}" if outcome.detail else f"  {outcome.reason}")
    if advice:
        typer.echo(f"  → {advice}")
    for tensor in outcome.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        typer.echo(f"  {tensor.name}  {tensor.dtype}  {shape}  {counted(tensor.nbytes, 'byte')}")
    if outcome.meta:
        typer.echo(f"  meta  {msgspec.json.encode(outcome.meta).decode()}")
    if outcome.output:
        typer.echo(f"  written to {outcome.output}")


def _more_of(key: EmbeddingKey) -> str:
    fields: Mapping[str, str | None] = {"lora": key.lora, "modality": key.modality, "tenant": key.tenant}
    return f"({', '.join(f'{name} {value}' for name, value in fields.items() if value is not None)})"
