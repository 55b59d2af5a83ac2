"""`tokenpod gateway`: a pod, and before it the gateway that speaks OpenAI's HTTP API.

    this process --starts--> tokenpod serve   gRPC, on this machine alone unless --hostname says so
                 --starts--> the gateway      HTTP; a program of others (the extra `gateway`)

The pod opens no HTTP port. The gateway can neither encrypt nor show a token: where the pod asks
for either, it calls the pod's loopback port. Either one's end is the end of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenpod.commands.serve import ServerCommand, named_flags, setting_flag
from tokenpod.core.own_process import die_with_parent
from tokenpod.service.config.rules import flag
from tokenpod.service.config.sources import ServerSettings, SettingsError, load_settings
from tokenpod.service.telemetry.logs import print_error
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.options import Argument, Spec, option, parameters

HELP = """Start a server with OpenAI's HTTP API before it.

    MODEL and the settings of the server are those of `tokenpod serve`; the server listens on this
    machine alone unless --hostname is given. The gateway is a program of others: pip install
    'tokenpod[gateway]'.
    """

#: What the gateway calls our parsers. A model of the harmony kind it knows by itself.
_CALLS = {
    "hermes": "qwen",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "llama3_json": "llama",
    "qwen3_coder": "qwen_coder",
    "deepseek": "deepseek31",
    "deepseek_dsml": "deepseek32",
    "glm": "glm45_moe",
    "kimi": "kimik2",
    "minimax": "minimax_m2",
    "gemma4": "gemma4",
}
#: What its process runs: its arguments come by standard input, since keys are among them.
_PROGRAM = "import json, sys; from smg.cli import main; main(json.loads(sys.stdin.readline()))"
_LOOK_SECONDS = 0.2
#: Seconds that the gateway gets to end its calls; the pod has limits of its own.
_GRACE_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """How the gateway listens, and who may call it."""

    http_host: str = option("Address of the HTTP API.", "HOST", default="127.0.0.1")
    http_port: int = option("Port of the HTTP API.", min=1, max=65535, default=8000)
    api_key_file: Path | None = option(
        "Keys that clients show, one per line; without it all may call.",
        exists=True,
        dir_okay=False,
    )
    http_tls_cert: Path | None = option(
        "Certificate of the HTTP API (PEM); turns HTTPS on.", exists=True, dir_okay=False
    )
    http_tls_key: Path | None = option(
        "Private key of --http-tls-cert (PEM).", exists=True, dir_okay=False
    )
    http_metrics_port: int = option(
        "Port of the gateway's own metrics, on this machine. 0: any.", min=0, max=65535, default=0
    )
    http_reasoning_parser: str | None = option(
        "The gateway's parser of reasoning, by its name there; reasoning is text else.",
        "NAME",
    )
    gateway_python: str = option(
        "Python of the environment that has the gateway, if it is another one.",
        "FILE",
        default=sys.executable,
    )


class GatewayError(Exception):
    """It can't be done; one line."""


def _run(**given: Any) -> int:
    """Start both, and wait for the end; the exit status."""
    own = {str(each.name): given.pop(str(each.name)) for each in _OPTIONS}
    flags = {name: value for name, value in given.items() if value is not None}
    try:
        flags = {"hostname": "127.0.0.1", "kv_cache_events": True, **named_flags(flags)}
        settings = load_settings(**flags)
        if settings.tls_cert is not None and settings.loopback_address is None:
            flags["loopback_port"] = _free_port()
            settings = load_settings(**flags)
        options = GatewayOptions(**own)
        _check(settings, options)
        with contextlib.ExitStack() as stack:
            return _Both(settings, options, flags).run(stack)
    except (SettingsError, GatewayError) as error:
        for line in str(error).splitlines():
            print_error(line, json_output=False)
        return 2 if isinstance(error, SettingsError) else 1


def _check(settings: ServerSettings, options: GatewayOptions) -> None:
    """Raise SettingsError for what can't go together, GatewayError where there is no gateway."""
    if settings.auth_token_file is not None and settings.tls_cert is None:
        raise SettingsError(
            f"--auth-token-file is {settings.auth_token_file}: the gateway shows the pod no token;"
            " with --tls-cert it needs none (--loopback-port). --api-key-file is for its clients"
        )
    if not settings.port:
        raise SettingsError("--port is 0: the gateway must know the pod's port")
    if (options.http_tls_cert is None) != (options.http_tls_key is None):
        raise SettingsError("--http-tls-cert and --http-tls-key go together")
    if options.gateway_python == sys.executable and importlib.util.find_spec("smg") is None:
        raise GatewayError("the gateway is not installed: pip install 'tokenpod[gateway]'")


class _Both:
    """The pod and the gateway, while they run."""

    def __init__(
        self, settings: ServerSettings, options: GatewayOptions, flags: dict[str, Any]
    ) -> None:
        self._settings, self._options, self._flags = settings, options, flags
        self._stopping = False

    def run(self, stack: contextlib.ExitStack) -> int:
        """Start the pod, then the gateway; the exit status of the one that ended first.

        Raises GatewayError if the gateway can't serve.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        pod = stack.enter_context(_child([sys.executable, "-P", "-m", "tokenpod", *self._serve()]))
        # Before this process speaks gRPC, whose threads a fork may break. It waits for arguments.
        gateway = stack.enter_context(_child([self._options.gateway_python, "-P", "-c", _PROGRAM]))
        if not self._await(self._pod_serves, pod):
            return 0 if self._stopping else pod.wait()
        arguments, told = json.dumps(["launch", *self._launch()]), gateway.stdin
        assert told is not None
        with contextlib.suppress(BrokenPipeError), told:
            told.write(arguments.encode() + b"\n")
        if not self._await(self._gateway_serves, pod, gateway):
            if self._stopping:
                return 0
            raise GatewayError("the gateway does not serve; what it has said is above")
        scheme = "http" if self._options.http_tls_cert is None else "https"
        where = f"{scheme}://{self._options.http_host}:{self._options.http_port}/v1"
        name = self._settings.served_name
        print(f"OpenAI's API: {where}, model {name}", file=sys.stderr, flush=True)
        while not self._stopping:
            for each in (pod, gateway):
                if (status := each.poll()) is not None:
                    return status or 1
            time.sleep(_LOOK_SECONDS)
        # Calls end before the pod that answers them does.
        _end(gateway, _GRACE_SECONDS)
        return 0

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True

    def _await(self, serves: Any, *processes: subprocess.Popen[bytes]) -> bool:
        """Wait until it serves; False: one of the processes has ended, or all is to."""
        while not serves():
            if self._stopping or any(each.poll() is not None for each in processes):
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    @property
    def _pod(self) -> str:
        if self._settings.loopback_address is not None:
            return self._settings.loopback_address
        host = self._settings.hostname
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self._settings.port}"  # noqa: S104

    def _serve(self) -> Iterator[str]:
        """The pod's command line."""
        yield "serve"
        for name, value in self._flags.items():
            if value is True or value is False:
                yield flag(name) if value else flag(f"no-{name}")
            else:
                yield from (flag(name), str(value))

    def _pod_serves(self) -> bool:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(self._pod) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service="readiness")
                # Its methods are set when it is made.
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(request, timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _launch(self) -> Iterator[str]:
        """The gateway's command line."""
        options = self._options
        yield from ("--host", options.http_host, "--port", str(options.http_port))
        metrics = options.http_metrics_port or _free_port()
        yield from ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics))
        yield from ("--policy", "cache_aware", "--log-level", "warn")
        yield from ("--shutdown-grace-period-secs", str(_GRACE_SECONDS))
        if options.http_tls_cert is not None and options.http_tls_key is not None:
            yield from ("--tls-cert-path", str(options.http_tls_cert))
            yield from ("--tls-key-path", str(options.http_tls_key))
        # What replaces the pod by another address, empties caches and loads code is for nobody.
        yield from ("--control-plane-api-keys", f"none:none:admin:{secrets.token_hex(32)}")
        for number, key in enumerate(self._keys()):
            yield from ("--tenant-api-key", f"key-{number}:{key}")
        yield from self._parsers()
        yield from ("--worker-urls", f"grpc://{self._pod}")

    def _keys(self) -> list[str]:
        file = self._options.api_key_file
        return [] if file is None else file.read_text(encoding="utf-8").split()

    def _parsers(self) -> Iterator[str]:
        """The gateway looks for calls itself, by a parser of its own, which the template shows."""
        from tokenpod_client.cli.commands import ask_model

        template = asyncio.run(ask_model(Remote(address=self._pod))).chat_template
        if (calls := _CALLS.get(template.tool_parser)) is not None:
            yield from ("--tool-call-parser", calls)
        # Its parsers of reasoning may take a whole answer for reasoning, where a template has marks
        # and the model has written none: who wants one names it.
        if (reasoning := self._options.http_reasoning_parser) is not None:
            yield from ("--reasoning-parser", reasoning)

    def _gateway_serves(self) -> bool:
        """Whether it knows the pod's model and can tokenise for it."""
        options = self._options
        connection: http.client.HTTPConnection
        if options.http_tls_cert is None:
            connection = http.client.HTTPConnection(self._host, options.http_port, timeout=5)
        else:
            # Whose certificate it is does not matter: the process is ours.
            trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                self._host, options.http_port, timeout=5, context=trusting
            )
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/readiness")
                return connection.getresponse().status == 200
            except OSError:
                return False

    @property
    def _host(self) -> str:
        host = self._options.http_host
        return "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that dies with this one, and is asked to end when the block is left.

    It leads a session of its own: a terminal's Ctrl-C reaches this process alone, which ends both
    in their order.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        yield process
    finally:
        _end(process, None)


def _end(process: subprocess.Popen[bytes], seconds: float | None) -> None:
    """Ask a process to end, and wait; kill it after so many seconds."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_OPTIONS = parameters(GatewayOptions)
_SETTINGS = [setting_flag(name, field) for name, field in ServerSettings.model_fields.items()]
_MODEL = Argument(Spec("The model to serve.", "[MODEL]"), "model", required=False)

gateway = ServerCommand("gateway", callback=_run, params=[_MODEL, *_OPTIONS, *_SETTINGS], help=HELP)
