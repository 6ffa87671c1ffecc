"""A vLLM engine within one process, which obeys one JSON object a line and reports the same way.

`python vllm_local_engine.py OPTIONS`; `vllm_engines.LocalEngine` is its other end. Requests may come while others wait,
since it steps the engine by itself:

    {"do": "add", "number": 1, "request": {…}}      ► {"number": 1, "answer": {…}} once it has ended
    {"do": "abort", "number": 1}                    ► {"said": null}
    {"do": "rpc", "method": "…", "arguments": […]}  ► {"said": [what each worker returned]}
    {"do": "metrics"}                               ► {"said": {name: sum}}
    {"do": "reset"}                                 ► {"said": null}

It ends with its stdin, and says {"died": traceback} when the engine does.
"""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from typing import Any

import msgspec
import torch
from vllm_engines import Request

from benchmarks.vllm_media import SAMPLING_RATE, Handed, Picture, Sound
from benchmarks.vllm_served import Answer, Options

PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


class Pending(msgspec.Struct):
    """A request under way; times are `time.monotonic()`."""

    number: int
    started: float
    first: float = 0.0


class Engine:
    """An `LLM`, stepped here instead of by its own methods."""

    def __init__(self, options: Options) -> None:
        from vllm import LLM

        self._llm = LLM(model=options.model, disable_log_stats=False, **options.all_arguments())
        self._engine = self._llm.llm_engine
        self._pending: dict[str, Pending] = {}
        self._names: dict[int, str] = {}

    @property
    def is_busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def add(self, number: int, request: Request) -> Answer | None:
        """An answer if it was refused at once."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = {"ec_transfer_params": request.ec_transfer_params} if request.ec_transfer_params else None
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        lora = LoRARequest(request.lora, 1, request.lora) if request.lora else None
        started = time.monotonic()
        try:
            name = f"request-{number}"
            self._engine.add_request(name, prompt(request), params, lora_request=lora)
        except Exception as error:  # noqa: BLE001 - whatever a request is refused with
            return Answer(error=repr(error))
        self._pending[name] = Pending(number, started)
        self._names[number] = name
        return None

    def step(self) -> list[tuple[int, Answer]]:
        ended = []
        for output in self._engine.step():
            name = output.request_id
            pending = self._pending.get(name)
            if pending is None:
                continue
            now = time.monotonic()
            completion = output.outputs[0]
            if completion.token_ids and not pending.first:
                pending.first = now
            if output.finished:
                del self._pending[name]
                whole = completion.finish_reason == "length"
                answer = Answer(
                    tokens=list(completion.token_ids) if whole else [],
                    error="" if whole else f"finished with {completion.finish_reason}",
                    ec_transfer_params=output.ec_transfer_params,
                    seconds=now - pending.started,
                    first_seconds=max(0.0, pending.first - pending.started),
                )
                ended.append((pending.number, answer))
        return ended

    def do(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "abort":
                name = self._names[command["number"]]
                self._pending.pop(name, None)
                self._engine.abort_request([name])
            case "rpc":
                return self._llm.collective_rpc(command["method"], args=tuple(command["arguments"]))
            case "metrics":
                from prometheus_client import REGISTRY, generate_latest

                return generate_latest(REGISTRY).decode()
            case "reset":
                self._engine.reset_encoder_cache()
                self._engine.reset_prefix_cache()
                self._engine.reset_mm_cache()
        return None


def prompt(request: Request) -> dict[str, Any]:
    """A request as vLLM's offline API takes it."""
    text = "<|im_start|>user\n"
    data: dict[str, Any] = {}
    uuids: dict[str, list[str | None]] = {}
    named = iter(request.uuids)
    for part in request.parts:
        if isinstance(part, str):
            text += part
            continue
        text += PLACEHOLDERS[part.modality]
        if isinstance(part, Handed):
            together = data.setdefault(part.modality, {})
            for name, tensor in part.fields().items():
                together[name] = torch.cat([together[name], tensor]) if name in together else tensor
            uuids.setdefault(part.modality, []).append(part.identifier)
            continue
        data.setdefault(part.modality, []).append(_plain(part))
        uuids.setdefault(part.modality, []).append(next(named, None))
    made: dict[str, Any] = {"prompt": text + "<|im_end|>\n<|im_start|>assistant\n"}
    if data:
        made["multi_modal_data"] = data
    if any(uuid is not None for given in uuids.values() for uuid in given):
        made["multi_modal_uuids"] = uuids
    if request.cache_salt is not None:
        made["cache_salt"] = request.cache_salt
    return made


def _plain(part: Any) -> Any:
    from PIL import Image

    if isinstance(part, Picture):
        return Image.fromarray(part.array())
    return (part.array(), SAMPLING_RATE) if isinstance(part, Sound) else part.array()


def main() -> None:
    wire = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # vLLM logs to stdout

    def say(**what: Any) -> None:
        wire.write(msgspec.json.encode(what) + b"\n")

    try:
        engine = Engine(msgspec.json.decode(sys.argv[1], type=Options))
        say(ready=True)
        unread = b""
        while True:
            if select.select([0], [], [], 0.0 if engine.is_busy else None)[0]:
                read = os.read(0, 1 << 20)
                if not read:
                    os._exit(0)  # nobody is there to ask for a graceful end
                unread += read
            *lines, unread = unread.split(b"\n")
            for command in map(msgspec.json.decode, lines):
                if command["do"] == "end":
                    break
                if command["do"] == "add":
                    request = msgspec.convert(command["request"], Request)
                    if (refusal := engine.add(command["number"], request)) is not None:
                        say(number=command["number"], answer=refusal)
                else:
                    say(said=engine.do(command))
            if engine.is_busy:
                for number, answer in engine.step():
                    say(number=number, answer=answer)
    except BaseException:
        say(died=traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
