"""`manylora doctor`: checks this machine, and says how to repair what is wrong."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manylora.cli.options import JSON

if TYPE_CHECKING:
    from manylora.engine.model.spec import DecoderSpec
    from manylora.engine.text.tokenizer import Tokenizer

MIN_DISK_GIB = 2
MIN_FILES = 1024
MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    result: Literal["ok", "warn", "fail"]
    detail: str
    hint: str | None = None


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Base model to look at: folder or GGUF file.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Where `manylora serve` would keep its data.")
    ] = Path("manylora-data"),
    port: Annotated[int, typer.Option(help="Port that `manylora serve` would bind.")] = 8000,
    blob_url: Annotated[
        str | None, typer.Option(help="Blob store to try: a folder or s3://BUCKET[/PREFIX].")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Check that Manylora can run on this machine. Exits with 1 if something would stop it."""
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        *_torch(),
    ]
    findings += [_disk(data_dir), _port(port), _open_files()]
    if model is not None:
        findings += _model(model)
    if blob_url is not None:
        findings.append(_blobs(blob_url))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            hint = f" -> {finding.hint}" if finding.hint else ""
            typer.echo(f"{MARKS[finding.result]}  {finding.check}: {finding.detail}{hint}")
    raise typer.Exit(int(any(finding.result == "fail" for finding in findings)))


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(
            "torch",
            "fail",
            f"cannot be imported: {error}",
            "install Manylora again: pip install manylora",
        )
        return
    yield Finding("torch", "ok", torch.__version__)
    if torch.cuda.is_available():
        try:
            yield Finding("triton", "ok", metadata.version("triton"))
        except metadata.PackageNotFoundError:
            yield Finding(
                "triton", "fail", "not installed; a GPU needs it", "pip install 'manylora[triton]'"
            )
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            major, minor = torch.cuda.get_device_capability(index)
            yield Finding(
                "device", "ok", f"{name}, sm_{major}{minor}, {free >> 30} of {total >> 30} GiB free"
            )
    else:
        yield Finding("device", "ok", f"CPU, {torch.get_num_threads()} threads; no CUDA device")
        yield from _cpu_kernels()


def _cpu_kernels() -> Iterator[Finding]:
    from manylora.kernels.native.compilation import NativeUnavailableError, cpu_features
    from manylora.kernels.native.levels import BF16, EMULATED_LEVELS, VNNI_LEVEL
    from manylora.kernels.native.library import describe, find_library, level_of
    from manylora.kernels.native.peaks import measure_peaks

    try:
        library = find_library()
    except NativeUnavailableError as error:
        yield Finding("CPU kernels", "warn", f"run as torch operators, slower: {error}")
        return
    if level_of(library) in EMULATED_LEVELS:
        said = (
            f"{describe(library)}; no such CPU ran these so far, and an emulator only some of them"
        )
        yield Finding("CPU kernels", "warn", said, "compare some answers with another machine's")
    elif level_of(library) == VNNI_LEVEL and cpu_features() >= BF16:
        said = f"{describe(library)}; this CPU multiplies bfloat16 more slowly than float32"
        yield Finding("CPU kernels", "ok", said)
    else:
        yield Finding("CPU kernels", "ok", describe(library))
    peaks = measure_peaks(library)
    rates = (f"{rate / 1e9:.0f} in {name}" for name, rate in peaks.multiply_adds_per_s.items())
    products = ", ".join(rates)
    reads = f"reads {peaks.bytes_per_s / 1e9:.0f} GB/s"
    yield Finding("CPU speed", "ok", f"{reads}; billions of multiply-adds a second: {products}")


def _disk(data_dir: Path) -> Finding:
    existing = next(
        folder for folder in (data_dir.absolute(), *data_dir.absolute().parents) if folder.exists()
    )
    free_gib = shutil.disk_usage(existing).free / (1 << 30)
    detail = f"{free_gib:.1f} GiB free at {existing}"
    if free_gib >= MIN_DISK_GIB:
        return Finding("disk", "ok", detail)
    return Finding("disk", "warn", detail, "free some space, or choose another --data-dir")


def _blobs(url: str) -> Finding:
    from manylora.adapters.blobs.store import open_blobs
    from manylora.config import RegistryConfig
    from manylora.errors import CapacityError, ConfigError

    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            open_blobs(RegistryConfig(blob_url=url), Path(folder)).probe()
    except (ConfigError, CapacityError) as error:
        return Finding("blob store", "fail", error.message)
    except OSError as error:
        return Finding(
            "blob store",
            "fail",
            f"cannot be written: {error.strerror}",
            "choose another --blob-url",
        )
    return Finding(
        "blob store",
        "ok",
        f"stores and gives back, {1000 * (time.perf_counter() - started):.0f} ms",
    )


def _port(port: int) -> Finding:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OverflowError:
            return Finding("port", "fail", f"{port} is no port", "use a --port from 1 to 65535")
        except OSError as error:
            return Finding(
                "port", "warn", f"{port} cannot be bound: {error.strerror}", "use another --port"
            )
    return Finding("port", "ok", f"{port} is free")


def _open_files() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_FILES:
        return Finding("open files", "ok", f"limit {soft}")
    return Finding("open files", "warn", f"limit {soft}", f"ulimit -n {MIN_FILES}")


def _model(model: str) -> Iterator[Finding]:
    from manylora.engine.model.spec import read_spec, resolve_model
    from manylora.engine.text.tokenizer import Tokenizer
    from manylora.errors import ConfigError

    try:
        folder = resolve_model(model, is_downloaded=True)
        spec = read_spec(folder)
        stored = (
            f", {spec.quantisation.bits} bits ({spec.quantisation.layout})"
            if spec.quantisation
            else ""
        )
        yield Finding(
            "model",
            "ok",
            f"{spec.architecture}, {spec.num_parameters / 1e6:.1f}M parameters{stored}",
        )
        tokenizer = Tokenizer(folder)
    except ConfigError as error:
        yield Finding(
            "model",
            "fail",
            error.message,
            "choose a folder with a supported Hugging Face checkpoint",
        )
        return
    yield Finding("tokenizer", "ok", f"{tokenizer.vocab_size} tokens")
    yield _chat_template(tokenizer)
    yield from _weights(spec)


def _chat_template(tokenizer: Tokenizer) -> Finding:
    from manylora.server.sandbox.chat_renderer import ChatRenderer

    async def fault() -> str | None:
        renderer = ChatRenderer(tokenizer)
        try:
            return await renderer.try_template()
        finally:
            await renderer.close()

    if not tokenizer.chat_template.source:
        return Finding("chat template", "warn", "there is none", "use /v1/completions")
    if (message := asyncio.run(fault())) is not None:
        return Finding(
            "chat template", "fail", message, "correct the template in the model's folder"
        )
    return Finding("chat template", "ok", "there is one")


def _weights(spec: DecoderSpec) -> Iterator[Finding]:
    """Memory and speed of each format of weights on a CPU."""
    import torch

    from manylora.engine.execution.memory_plan import model_bytes
    from manylora.engine.model.device import choose_dtype
    from manylora.engine.model.weight_speed import MANY, weight_speeds

    if torch.cuda.is_available():
        return
    dtype = choose_dtype("auto", spec.dtype, torch.device("cpu"))
    speeds = weight_speeds(spec, dtype)
    fastest = [max(speeds, key=lambda weights: speeds[weights][many]) for many in (0, 1)]
    for weights, (alone, together) in speeds.items():
        gib = model_bytes(spec, weights, dtype.itemsize, on_cpu=True) / (1 << 30)
        users = [
            users
            for users, best in zip(("one or two users", "many users"), fastest, strict=True)
            if best == weights
        ]
        yield Finding(
            f"weights in {weights}",
            "ok",
            f"{gib:.2f} GiB; below {alone:,.0f} tokens/s for one request, {together:,.0f} for {MANY} at once",
            f"fastest for {' and '.join(users)}: --weights {weights}" if users else None,
        )
