"""`tokenpod download`: a model from a hub or an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenpod_client.cli.errors import print_error
from tokenpod_client.cli.options import argument, command, option


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is downloaded, and to where."""

    model: str = argument(
        "org/name on a Hugging Face hub, or s3://, gs:// or az:// and a path.", "MODEL"
    )
    folder: Path = argument("The folder to make.", "FOLDER")
    revision: str | None = option("Of a hub's model: branch, tag or commit.")
    token_file: Path | None = option(
        "File with a token of the hub; otherwise HF_TOKEN or HF_TOKEN_PATH."
    )
    pickles: bool = option(
        "Take pytorch_model.bin or medusa_lm_head.pt where there are no safetensors.",
        flag="--pickles",
        default=False,
    )


@command(Wanted)
def download(wanted: Wanted) -> int:
    """Download the files of a model that a server reads, and note their digests.

    A download that was killed goes on where it was. HF_ENDPOINT names another hub; object stores
    have the variables of their own tools.
    """
    from tokenpod.service.download.download import download as fetch
    from tokenpod.service.download.progress import DownloadBar
    from tokenpod.service.download.store import DownloadError
    from tokenpod.service.download.stores import store_of
    from tokenpod.service.telemetry.logs import configure_logging

    configure_logging(level="info", json_output=False)
    bar = DownloadBar(wanted.model)
    try:
        store = store_of(wanted.model, wanted.revision, token_file=wanted.token_file)
        found = fetch(store, wanted.folder, bar, pickles=wanted.pickles)
    except DownloadError as error:
        bar.close()
        again = "; the next try goes on from what is there" if error.resumable else ""
        print_error(f"{error}{again}")
        return 1
    bar.close()
    done = f"{found.fetched:,} bytes downloaded" if found.fetched else "it was there already"
    print(f"{found.folder}: {done}")
    return 0
