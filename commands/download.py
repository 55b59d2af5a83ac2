"""`tokenpod download`: a model from a hub or an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenpod.service.telemetry.logs import print_error


def download(
    model: Annotated[
        str,
        typer.Argument(help="org/name on a Hugging Face hub, or s3://, gs:// or az:// and a path."),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    revision: Annotated[
        str | None, typer.Option(help="Of a hub's model: branch, tag or commit.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with a token of the hub; otherwise HF_TOKEN or HF_TOKEN_PATH."),
    ] = None,
    pickles: Annotated[
        bool,
        typer.Option("--pickles", help="Take pytorch_model.bin where there are no safetensors."),
    ] = False,
) -> None:
    """Download the files of a model that a server reads, and note their digests.

    A download that was killed goes on where it was. HF_ENDPOINT names another hub; object stores
    have the variables of their own tools.
    """
    from tokenpod.service.download.download import download as fetch
    from tokenpod.service.download.progress import DownloadBar
    from tokenpod.service.download.store import DownloadError, store_of
    from tokenpod.service.telemetry.logs import configure_logging

    configure_logging(level="info", json_output=False)
    bar = DownloadBar(model)
    try:
        store = store_of(model, revision, token_file=token_file)
        found = fetch(store, folder, bar, pickles=pickles)
    except DownloadError as error:
        bar.close()
        again = "; the next try goes on from what is there" if error.resumable else ""
        print_error(f"{error}{again}", json_output=False)
        raise typer.Exit(1) from None
    bar.close()
    done = f"{found.fetched:,} bytes downloaded" if found.fetched else "it was there already"
    print(f"{found.folder}: {done}")
