"""`shoal serve`: metrics of all runs in a folder over HTTP, for Prometheus; no torch."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

FOLDER = typer.Argument(Path("runs"), metavar="[FOLDER]", help="Holds run folders; default: runs.")
HOST = typer.Option("127.0.0.1", "--host", help="Address to listen on; others need a token.")
PORT = typer.Option(9877, "--port", min=0, max=65535, help="0: a free one, which is printed.")
TOKEN_FILE = typer.Option(
    None, "--token-file", help="Holds the bearer token of requests; else SHOAL_TOKEN."
)
WRITE = typer.Option(
    None, "--write", help="Write the metrics to this file once, and serve nothing."
)


def serve(
    folder: Path = FOLDER,
    host: str = HOST,
    port: int = PORT,
    token_file: Path | None = TOKEN_FILE,
    write: Path | None = WRITE,
) -> None:
    """Serve the metrics of all runs in a folder at /metrics, for Prometheus.

    Reads the folders only, also while their runs write. Ctrl-C ends it, with exit status 0.
    """
    from shoal.base.runlog.atomic_files import write_atomically
    from shoal.view.metrics_server.run_metrics import RunMetrics

    if not folder.is_dir():
        from shoal.view.diagnosis.run_folders import explain_no_run

        raise ConfigError(explain_no_run(folder))
    if write is not None:
        write_atomically(write, RunMetrics(folder).format_page())
        return
    from shoal.view.metrics_server.http_server import MetricsServer, is_loopback

    token = _read_token(token_file)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could read the metrics without a token; try: "
            f"--token-file FILE, or SHOAL_TOKEN=…, or --host 127.0.0.1"
        )
    try:
        server = MetricsServer(
            (host, port),
            RunMetrics(folder).format_page,
            token,
            lambda line: typer.echo(line, err=True),
        )
    except OSError as failure:
        raise ConfigError(
            f"--host {host} --port {port}: {failure.strerror or failure}; try: --port 0, a free one"
        ) from failure
    name = f"[{host}]" if ":" in host else host
    with server:
        typer.echo(
            f"http://{name}:{server.server_address[1]}/metrics: runs in {folder}; end: Ctrl-C"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended")


def _read_token(file: Path | None) -> str | None:
    """Return the token of requests; None without one.

    Raises:
        ConfigError: the file is unreadable, or the token is empty or not printable ASCII.
    """
    where, token = "SHOAL_TOKEN", os.environ.get("SHOAL_TOKEN")
    if file is not None:
        where = f"--token-file {file}"
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as failure:
            reason = getattr(failure, "strerror", None) or "is no text"
            raise ConfigError(f"{where}: {reason}; try: openssl rand -hex 32 > FILE") from failure
    if token is not None and not (
        token.isascii() and token.isprintable() and token.split() == [token]
    ):
        raise ConfigError(
            f"{where}: a token is one word of ASCII letters; try: openssl rand -hex 32"
        )
    return token
