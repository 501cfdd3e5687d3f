"""Published weights: found through timm's register, fetched from its hub or taken from the local cache."""

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from vit_edge.errors import UserError
from vit_edge.models import zoo

FILES = ("model.safetensors", "pytorch_model.bin")
CONNECT_SECONDS = 5.0
FROM_A_FILE = "give a file that you have with --weights FILE, or train from scratch with --weights none"


def fetch(name: str, say: Callable[[str], None], *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The file with the published weights of the model called `name`.

    endpoint, cache: the hub's address and the cache's folder; default: the hub client's own (HF_ENDPOINT, HF_HOME).
    Raises UserError when none are published or they cannot be fetched.
    """
    config = zoo.published_config(zoo.published_name(name))
    repository = config.hf_hub_id
    files = (config.hf_hub_filename,) if config.hf_hub_filename else FILES
    for file in files:
        cached = try_to_load_from_cache(repository, file, cache)
        if isinstance(cached, str):
            return Path(cached)
    _check_reachable(repository, endpoint or constants.ENDPOINT)
    say(f"fetching the weights {repository}")
    try:
        return _first_of(repository, files, endpoint, cache)
    except (OSError, HfHubHTTPError, EntryNotFoundError) as err:
        reason = " ".join(str(err).split()).partition(". ")[0][:200]
        raise UserError(f"cannot fetch the weights {repository}: {reason}", FROM_A_FILE) from err


def _first_of(repository: str, files: tuple[str, ...], endpoint: str | None, cache: Path | None) -> Path:
    """The first of `files` that the repository has."""
    for file in files[:-1]:
        try:
            return Path(hf_hub_download(repository, file, endpoint=endpoint, cache_dir=cache))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            continue
    return Path(hf_hub_download(repository, files[-1], endpoint=endpoint, cache_dir=cache))


def _check_reachable(repository: str, endpoint: str) -> None:
    """One quick connection first: the hub's own client tries for most of a minute before it gives up."""
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"the weights {repository} are not in the cache, and HF_HUB_OFFLINE is set", FROM_A_FILE)
    address = urlsplit(endpoint)
    host = address.hostname or ""
    if address.scheme in getproxies() and not proxy_bypass(host):
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as err:
        reason = err.strerror or str(err)
        raise UserError(f"cannot reach {host} for the weights {repository}: {reason}", FROM_A_FILE) from err
