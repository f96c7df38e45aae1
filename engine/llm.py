"""The engine in the caller's process, for scripts and batch work: prompts in, completions out."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.checkpoint.folder import adapter_files
from manylora.adapters.checkpoint.reader import read_checkpoint
from manylora.adapters.ref import AdapterRef, content_digest
from manylora.config import (
    AdapterConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    RegistryConfig,
    SchedulerConfig,
)
from manylora.engine.build import build_engine
from manylora.engine.grammar.json_schema import with_schemas_read
from manylora.engine.request import (
    ERRORS_BY_KIND,
    FinishReason,
    GenerationRequest,
    Grammar,
    RequestOutput,
    TokenLogprobs,
)
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import TextStream
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import ConfigError, EngineError, InvalidRequestError

BLOCKED_WAIT_S = 0.02
_SECTIONS = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "adapter": AdapterConfig,
    "scheduler": SchedulerConfig,
}
_Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of the last change of each file of an adapter."""


@dataclass(kw_only=True)
class Completion:
    """Completion of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each token, if they are asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each prompt token, if they are asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token that ended it."""


class LLM:
    """A model with its adapters in this process. Use it as a context manager, or call `close`.

    Args:
        model: Folder of a Hugging Face checkpoint, or a hub id.
        settings: Fields of the sections model, memory, adapter and scheduler of `manylora.config`, by name (`dtype`,
            `max_rank`, `step_tokens`), or by section and name (`memory_gib`).

    Raises:
        ConfigError: A setting is unknown or wrong, or the model cannot be loaded.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:  # noqa: ANN401 - each section checks its own
        self._loaded = threading.Event()
        self._ids = itertools.count(1)
        self._refs: dict[Path, tuple[_Stamp, AdapterRef]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="manylora-"))
        try:
            self._config = _config(str(model), self._folder, settings)
            self.engine = build_engine(self._config, notify=self._loaded.set)
            self.tokenizer = Tokenizer(self.engine.tokenizer_path)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._blobs = LocalBlobs(self._config.blob_dir)

    def load_adapter(self, path: str | Path) -> AdapterRef:
        """Check a checkpoint of PEFT or mlx-lm, and make it known. Its first request brings it to the device.

        Args:
            path: Folder with `adapter_config.json` and `adapter_model.safetensors`, or MLX's `adapters.safetensors`.

        Raises:
            AdapterFormatError: A file is missing, or not as PEFT writes it.
            AdapterIncompatibleError: It is not for this model.
        """
        folder = Path(path)
        stamp = _stamp(folder)
        config_file, weights = adapter_files(folder)
        ready = self.engine.ready
        checkpoint = read_checkpoint(config_file.read_bytes(), weights, ready.base, ready.max_rank)
        with weights.open("rb") as source, self._blobs.create() as writer:
            shutil.copyfileobj(source, writer)
            weights_sha256 = writer.commit()
        ref = AdapterRef(
            tenant_id="local",
            adapter_id=str(folder),
            version=1,
            digest=content_digest(checkpoint.spec, weights_sha256),
            weights_sha256=weights_sha256,
            config=checkpoint.spec,
        )
        self._refs[folder] = (stamp, ref)
        return ref

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterRef | str | Path | Sequence[AdapterRef | str | Path | None] | None = None,
        grammar: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all in one batch.

        Args:
            prompts: Texts, or token ids.
            params: Sampling parameters, for all prompts or one per prompt.
            adapter: Result of `load_adapter` or a folder, for all prompts or one per prompt; None is the base.
            grammar: Grammar that completions follow, in llguidance's Lark, such as `start: %json {...}`, for all
                prompts or one per prompt; None is no grammar.

        Returns:
            One completion per prompt, in their order.

        Raises:
            RequestError: A prompt cannot be served. No prompt was served then.
            InvalidRequestError: A grammar has a JSON schema that completions cannot be held to.
            CapacityError: There are more prompts than may wait, or an adapter could not be loaded.
        """
        texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        all_params = _spread(params or SamplingParams(), len(texts), "params", SamplingParams)
        adapters = _spread(adapter, len(texts), "adapter", (AdapterRef, str, Path, type(None)))
        grammars = _spread(grammar, len(texts), "grammar", (str, type(None)))
        requests = [
            GenerationRequest(
                request_id=str(next(self._ids)),
                prompt_token_ids=self.tokenizer.encode(text)
                if isinstance(text, str)
                else list(text),
                params=own,
                adapter=self._ref(chosen),
                grammar=None if lark is None else Grammar.of(with_schemas_read(lark)),
            )
            for text, own, chosen, lark in zip(texts, all_params, adapters, grammars, strict=True)
        ]
        completions = [Completion(prompt_token_ids=each.prompt_token_ids) for each in requests]
        unfinished = {
            request.request_id: (
                completion,
                TextStream(self.tokenizer, request.params, request.prompt_token_ids),
            )
            for request, completion in zip(requests, completions, strict=True)
        }
        try:
            for request in requests:
                self.engine.core.submit(request)
            self._pump(unfinished)
        finally:
            for request in requests:
                self.engine.core.abort(request.request_id)
            self.engine.core.pump()
        return completions

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        adapter: AdapterRef | str | Path | None = None,
    ) -> Completion:
        """Answer a conversation, which the model's chat template writes as a prompt."""
        (completion,) = self.generate([self.tokenizer.chat_prompt(messages)], params, adapter)
        return completion

    def close(self) -> None:
        """Free the memory."""
        self.engine.core.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pump(self, unfinished: dict[str, tuple[Completion, TextStream]]) -> None:
        """Compute until all completions are finished; `unfinished` has them and their texts by request id."""
        while unfinished:
            self._loaded.clear()
            steps_before = self.engine.core.num_steps
            for output in self.engine.core.pump():
                if output.request_id in unfinished and _add(*unfinished[output.request_id], output):
                    del unfinished[output.request_id]
                    self.engine.core.abort(output.request_id)  # the engine may not know its end
            if self.engine.core.num_steps == steps_before:
                self._loaded.wait(BLOCKED_WAIT_S)

    def _ref(self, adapter: AdapterRef | str | Path | None) -> AdapterRef | None:
        if adapter is None or isinstance(adapter, AdapterRef):
            return adapter
        stamp, ref = self._refs.get(Path(adapter), (None, None))
        # A folder that was trained again is another adapter.
        return (
            ref
            if ref is not None and stamp == _stamp(Path(adapter))
            else self.load_adapter(adapter)
        )


def _add(completion: Completion, stream: TextStream, output: RequestOutput) -> bool:
    """Add an output to a completion, and return True if it is finished. *Mutates* the completion."""
    if output.error is not None:
        raise ERRORS_BY_KIND.get(output.error.kind, EngineError)(
            output.error.message, code=output.error.code
        )
    delta = stream.push(output)
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if delta.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + delta.logprobs
    completion.prompt_logprobs = output.prompt_logprobs or completion.prompt_logprobs
    completion.finish_reason = delta.finish_reason
    completion.stop_reason = delta.stop_reason
    return stream.is_finished


def _stamp(folder: Path) -> _Stamp:
    stats = [file.stat() for file in adapter_files(folder)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _spread(given: Any, count: int, name: str, kinds: type | tuple[type, ...]) -> list[Any]:  # noqa: ANN401
    """Spread one value to all prompts, or check one value per prompt."""
    if isinstance(given, kinds):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"{name} must be one value, or one for each of {count} prompts, got {len(given)}."
        )
    return list(given)


def _config(model: str, folder: Path, settings: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    sections["model"]["path"] = model
    for setting, value in settings.items():
        places = [
            (section, each.name)
            for section, kind in _SECTIONS.items()
            for each in fields(kind)
            if setting in (each.name, f"{section}_{each.name}") and each.name != "path"
        ]
        if not places:
            raise ConfigError(
                f"{setting} is not a setting of the model, memory, adapter or scheduler.",
                param=setting,
            )
        section, name = places[0]
        sections[section][name] = value
    made: dict[str, Any] = {name: kind(**sections[name]) for name, kind in _SECTIONS.items()}
    return Config(registry=RegistryConfig(blob_url=str(folder)), **made)
