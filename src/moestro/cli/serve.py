"""`moestro serve`: arguments in, an endpoint up; the work is in `moestro.serve`."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli import options
from moestro.cli.refusal import refusals
from moestro.cli.sizes import memory_budget, parse_bytes
from moestro.errors import invalid_input, unsupported

if TYPE_CHECKING:
    from moestro.hf.text_model import TextModel
    from moestro.serve.service import Limits, Service

OPERATION = "serve"
_LONGEST_GRACE = 86400


def serve(
    model: Annotated[str | None, typer.Argument(help="A local folder or a hub id; else the bundled model.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; else its folder's name.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Keys that open it, separated by commas; else MOESTRO_API_KEY's.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests that are computed together.", min=1)] = 1,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; others get 429.", min=0)] = 64,
    max_body: Annotated[str, typer.Option(help="The largest body of a request.")] = "4MiB",
    prefix_memory: Annotated[str, typer.Option(help="For keys and values of earlier prompts; 0 for none.")] = "1GiB",
    kv_memory: Annotated[
        str | None, typer.Option(help="For keys and values of running requests; else what their contexts take.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of a request that does not say.", min=1)] = 1024,
    grace: Annotated[float, typer.Option(help="Seconds that requests may take when it stops.", min=0)] = 10.0,
    dtype: options.Dtype = "auto",
    format: options.Format = None,
    input_format: options.InputFormat = "float",
    projections: options.Projections = "auto",
    memory: options.Memory = None,
    prefetch: options.Prefetch = False,
    device_memory: options.DeviceMemory = None,
    device: options.Device = "cpu",
    strategy: options.Strategy = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell each request on stderr.")] = False,
) -> None:
    """Serve a Mixture-of-Experts language model to OpenAI's clients: chat, completions and responses.

    SIGINT or SIGTERM ends it, after --grace seconds for requests; what cannot be done one line, with exit code 2.
    For instance: moestro serve openai/gpt-oss-20b --port 8000 --batch 4
    """
    with refusals():
        _check_installed()
        from moestro.hf.text_model import quiet_transformers
        from moestro.serve.engine import Engine
        from moestro.serve.metrics import Loads, Metrics
        from moestro.serve.server import Server, listen
        from moestro.serve.service import Service

        keys = read_keys(api_key)
        limits = _limits(max_body, max_new_tokens, grace)
        prefix_bytes = parse_bytes(OPERATION, "--prefix-memory", prefix_memory)
        kv_bytes = None if kv_memory is None else parse_bytes(OPERATION, "--kv-memory", kv_memory)
        with listen(host, port) as address:
            how = {"memory": memory_budget(OPERATION, memory, prefetch, device_memory), "projections": projections}
            text_model = _load(model, (dtype, device, strategy), format, {**how, "input_format": input_format})
            loads = Loads(text_model.model.get_submodule(layer.path) for layer in text_model.served)
            with quiet_transformers(), loads.watched():
                engine = Engine(text_model, batch, max_waiting, prefix_bytes, kv_bytes)
                service = Service(text_model, engine, name or _name(text_model), limits, Metrics(loads))
                server = Server(service, keys, verbose)
                address.listen()  # from here on clients are heard, and answered once the server runs
                print("\n".join(_said(service, address.getsockname(), keys)), flush=True)
                server.run(sockets=[address])
        if server.force_exit:
            raise typer.Exit(1)  # the engine's thread ends with the process
        service.close()
        _say_reads(text_model)


def _load(model: str | None, place: tuple[str, str, str], format: str | None, options: dict[str, Any]) -> TextModel:
    """The model; `place` is dtype, device and strategy, and `options` are others of `MoestroConfig`."""
    from moestro.hf import MoestroConfig
    from moestro.hf.text_model import load_text_model, quiet_transformers

    with quiet_transformers(progress=model is not None and sys.stderr.isatty()):
        return load_text_model(model, *place, None, MoestroConfig(format, **options))


def _say_reads(text_model: TextModel) -> None:
    """What was read of experts, where they are within a budget."""
    from moestro.hf.memory import hits_line

    if (line := hits_line(text_model.model)) is not None:
        typer.secho(line, err=True, dim=True)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import openai  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise unsupported(
            OPERATION,
            got=f"an installation without {error.name}",
            needs="fastapi, llguidance, openai, prometheus-client and uvicorn",
            fix='Install them: pip install "moestro[serve]".',
        ) from None


def _limits(max_body: str, max_new_tokens: int, grace: float) -> Limits:
    from moestro.serve.service import Limits

    if grace > _LONGEST_GRACE:
        needs = f"seconds from 0 to {_LONGEST_GRACE}, a day"
        raise invalid_input(OPERATION, got=f"--grace {grace:g}", needs=needs, fix="Change it.")
    return Limits(parse_bytes(OPERATION, "--max-body", max_body), max_new_tokens=max_new_tokens, grace=grace)


def read_keys(given: str | None) -> list[str]:
    """The keys of a list with commas, or else of the environment."""
    from moestro.settings import api_keys

    text = api_keys() if given is None else given
    keys = [key.strip() for key in (text or "").split(",")]
    if text is not None and not all(keys):
        raise invalid_input(
            OPERATION,
            got="an API key that is empty",
            needs="keys of at least one character, separated by commas",
            fix="Write one, or leave --api-key and MOESTRO_API_KEY out.",
        )
    return keys if text is not None else []


def _name(text_model: TextModel) -> str:
    """The folder's name, or the hub id."""
    path = PurePath(text_model.name)
    return path.name if path.is_absolute() or len(path.parts) != 2 or text_model.name.startswith(".") else str(path)


def _said(service: Service, address: Any, keys: list[str]) -> list[str]:
    """Where it listens, what it serves by what, how to ask it, and what a memory budget holds."""
    from moestro.hf.memory import memory_line

    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    served, dtype = service.text_model.served, str(service.text_model.model.dtype).removeprefix("torch.")
    ran = ", ".join(sorted(service.metrics.loads.implementations))
    stored = "".join(f", experts {layout}" for layout in sorted({layer.layout for layer in served if layer.stored}))
    header = ' -H "Authorization: Bearer $MOESTRO_API_KEY"' if keys else ""
    lines = [
        f"{url}/v1 serves {service.name}: {len(served)} expert layers by {ran}, {dtype}{stored}",
        f"curl {url}/v1/completions{header} -H 'Content-Type: application/json' "
        """-d '{"prompt": "def fibonacci(n):", "max_tokens": 32}'""",
    ]
    if (held := memory_line(service.text_model.model)) is not None:
        lines.append(held)
    if service.engine.reused is not None:
        lines.append(f"No prompt reuses what an earlier one began with: that needs {service.engine.reused}.")
    if not keys and host not in ("127.0.0.1", "::1"):
        lines.append(f"Warning: everyone who reaches {url} can use it. --api-key asks for a key.")
    return lines
